"""`hf-cpu-accel quantize`: pack a model in 4 or 8 bits, with examples if there are any, and report what that costs it."""

from __future__ import annotations

import importlib.util
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_cpu_accel.cli import options
from hf_cpu_accel.cli.failures import cannot_load

if TYPE_CHECKING:
    from rich.console import Console

    from hf_cpu_accel.cli.quantize.report import Report
    from hf_cpu_accel.config import CPUAccelConfig

# torch and everything on it is imported inside the command: `hf-cpu-accel --help` must not wait for it.

# For a dtype, those that a mix may have besides.
_FINER = {"int4": ("int8", "bfloat16"), "int8": ("bfloat16",)}
_WINDOW = 128  # tokens of an example to measure on
_PICTURE = "quantization.png"


def quantize(
    model: Annotated[str, typer.Argument(help="Model id or local folder.", show_default=False)],
    folder: Annotated[
        Path | None, typer.Argument(help="The folder to write; none: only report.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="int4 or int8.")] = "int4",
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A text: int4 weights are rounded for it, and the report is measured on it.",
            show_default=False,
        ),
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Tell what each linear loses.")] = False,
    size: Annotated[
        float | None,
        typer.Option(min=0, help="MB that the linears may take: propose mixed bits.", show_default=False),
    ] = None,
    accuracy: Annotated[
        float | None,
        typer.Option(
            help="Propose mixed bits for a loss of -log of this at most, 0.99 for one per cent.",
            show_default=False,
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help=f"Of the report [default: {_PICTURE} in FOLDER, or here].", show_default=False),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the report as JSON, too.", show_default=False)
    ] = None,
    int4_group: Annotated[int, typer.Option(help="As for pack.")] = 32,
    tokens: Annotated[
        int, typer.Option(min=1, help="Of the text, how many the report is measured on.")
    ] = 4096,
    threads: Annotated[int | None, options.threads()] = None,
) -> None:
    """Quantize a model of transformers that reads text, and write it as `pack` does.

    hf-cpu-accel quantize HuggingFaceTB/SmolLM2-360M-Instruct ./smollm2-int4 --calibration some.txt --report
    """
    from rich.console import Console

    from hf_cpu_accel.cli.pack import write
    from hf_cpu_accel.cli.tables import wide_console
    from hf_cpu_accel.runtime.threads import apply_threads

    try:
        settings = _settings(dtype, int4_group, folder, model, size, accuracy)
        text = _text(calibration)
        wanted = report or any(value is not None for value in (size, accuracy, picture, json))
        picture = _picture(picture, folder) if wanted else None
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if folder is None and picture is None:
        raise typer.BadParameter("nothing to do: give a FOLDER to write, or --report")
    apply_threads(threads)
    console = Console(highlight=False)
    try:
        start = time.perf_counter()
        loaded, tokenizer = _load(model, console)
        seconds = time.perf_counter() - start
        found = None
        if picture is not None:
            found = _measured(loaded, tokenizer, text, settings, calibration is not None, tokens, console)
            found = _with_proposal(found, model, size, accuracy)
            _print(found, wide_console(), picture, json)
            if found.asked and found.chosen is None:
                raise ValueError(f"no mix has {found.asked}, and nothing is written")
        if folder is not None:
            rounding = _rounding(text, tokenizer, settings, calibration is not None)
            mixed = {} if found is None or found.chosen is None else {"dtypes": found.exceptions()}
            write(
                console,
                model,
                loaded,
                folder,
                settings,
                {"load": seconds},
                originals="drop",
                **rounding,
                **mixed,
            )
    except OSError as error:
        raise cannot_load(console, model, error) from error
    except (ValueError, RuntimeError) as error:
        console.print(f"{model}: {error}", style="red", markup=False)
        raise typer.Exit(1) from error


def _settings(
    dtype: str, int4_group: int, folder: Path | None, model: str, size: float | None, accuracy: float | None
) -> CPUAccelConfig:
    from hf_cpu_accel.cli.pack import check_folder
    from hf_cpu_accel.config import CPUAccelConfig
    from hf_cpu_accel.frontends.gguf import split_path

    if dtype not in _FINER:
        raise ValueError(f"--dtype {dtype}: accepted are {' and '.join(_FINER)}")
    if split_path(model) is not None:
        raise ValueError(
            f"{model} is quantized already: use `pack`, or quantize the model that it was made of"
        )
    if folder is not None:
        check_folder(model, folder)
    if size is not None and accuracy is not None:
        raise ValueError("--size and --accuracy: give one of them")
    if accuracy is not None and not 0 < accuracy < 1:
        raise ValueError(f"--accuracy {accuracy}: expected more than 0 and less than 1, such as 0.99")
    return CPUAccelConfig(dtype=dtype, int4_group=int4_group)


def _text(calibration: Path | None) -> str:
    """The file, or sentences that are there where there is none."""
    from importlib import resources

    if calibration is not None:
        text = calibration.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError(f"--calibration {calibration}: there is no text in it")
        return text
    return resources.files("hf_cpu_accel.cli").joinpath("demo_sentences.txt").read_text(encoding="utf-8")


def _picture(picture: Path | None, folder: Path | None) -> Path:
    from hf_cpu_accel.cli.bench.report import CHART_SUFFIXES

    path = picture or (folder or Path()) / _PICTURE
    if path.suffix not in CHART_SUFFIXES:
        raise ValueError(f"--picture {path}: accepted endings are {', '.join(CHART_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--report needs matplotlib: pip install matplotlib")
    return path


def _load(model: str, console: Console) -> tuple[Any, Any]:
    """The model, without gradients, and its tokenizer."""
    from transformers import AutoTokenizer

    from hf_cpu_accel.cli.pack import load

    with console.status(f"loading {model}"):
        return load(model).requires_grad_(False), AutoTokenizer.from_pretrained(model)


def _rounding(text: str, tokenizer: Any, settings: CPUAccelConfig, calibrated: bool) -> dict[str, Any]:
    """The options by which weights are rounded for the text."""
    return {"calibration": [text], "tokenizer": tokenizer} if calibrated and settings.dtype == "int4" else {}


def _measured(
    model: Any,
    tokenizer: Any,
    text: str,
    settings: CPUAccelConfig,
    calibrated: bool,
    tokens: int,
    console: Console,
) -> Report:
    """What each linear loses in `settings.dtype`, and what mixes would."""
    from rich.progress import Progress

    from hf_cpu_accel.api import accelerated
    from hf_cpu_accel.cli.quantize.measure import Answers, measure, packed_linears, steps
    from hf_cpu_accel.cli.quantize.mix import mixes
    from hf_cpu_accel.cli.quantize.report import Report
    from hf_cpu_accel.rewrite.core.calibration import calibration_examples

    dtype, loaded_as = settings.dtype, model.dtype
    calls = calibration_examples([text], model, tokenizer, window=_WINDOW, batches=10**9)[
        : max(1, tokens // _WINDOW)
    ]
    fields: dict[str, Any] = {"int4_group": settings.int4_group, "originals": "memory"}
    rounding = _rounding(text, tokenizer, settings, calibrated)
    model.float()
    answers = Answers(model, calls)
    with accelerated(model, dtype=dtype, **fields, **rounding):
        packed, whole = {dtype: packed_linears(model)}, answers.loss(model)
    for finer in _FINER[dtype]:
        with accelerated(model, dtype=finer, **fields):
            packed[finer] = packed_linears(model)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("measuring each linear", total=steps(calls))
        losses = measure(model, calls, packed, lambda: progress.advance(bar))
    model.to(loaded_as)
    unit = "nats" if answers.of_logits else "1 - cosine"
    return Report("", dtype, unit, whole, losses, mixes(losses), None, "")


def _with_proposal(report: Report, model: str, size: float | None, accuracy: float | None) -> Report:
    from dataclasses import replace

    from hf_cpu_accel.cli.quantize.mix import proposal

    title = f"{Path(model).name}: {report.dtype}"
    if size is None and accuracy is None:
        return replace(report, title=title)
    loss = None if accuracy is None else -math.log(accuracy)
    asked = f"at most {size:g} MB" if size is not None else f"accuracy {accuracy:g}"
    chosen = proposal(report.found, nbytes=None if size is None else size * 1e6, loss=loss)
    return replace(report, title=title, chosen=chosen, asked=asked)


def _print(report: Report, console: Console, picture: Path, json: Path | None) -> None:
    from hf_cpu_accel.cli.quantize import report as reports

    console.print(report.summary(), highlight=False)
    for table in (
        reports.kinds_table(report),
        reports.worst_table(report),
        reports.mix_table(report),
    ):
        console.print()
        console.print(table)
    picture.parent.mkdir(parents=True, exist_ok=True)
    reports.write_picture(picture, report)
    console.print(f"\n[bold]{picture}[/bold]")
    if json is not None:
        reports.write_json(json, report)
