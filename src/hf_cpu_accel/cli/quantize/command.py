"""`hf-cpu-accel quantize`: pack a model in 4 or 8 bits, calibrated on a text if there is one, and report the loss."""

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

# The command imports torch when it runs, so that `hf-cpu-accel --help` does not wait for it.

# {dtype: further dtypes that a mix of it may contain}
_FINER = {"int4": ("int8", "bfloat16"), "int8": ("bfloat16",)}
_WINDOW = 128  # tokens per example of the measurement
_PICTURE = "quantization.png"


def quantize(
    model: Annotated[str, typer.Argument(help="Model id or local folder.", show_default=False)],
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder to write; without it, only report.", show_default=False),
    ] = None,
    dtype: Annotated[str, typer.Option(help="dtype of the packed weights: int4 or int8.")] = "int4",
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Text file for calibration of int4 weights; the report is measured on it.",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Report the loss of each linear; needs matplotlib.")
    ] = False,
    size: Annotated[
        float | None,
        typer.Option(
            min=0, help="Propose mixed dtypes for linears of at most this many MB.", show_default=False
        ),
    ] = None,
    accuracy: Annotated[
        float | None,
        typer.Option(
            help="Propose mixed dtypes for a loss of at most -log(ACCURACY); 0.99 is a loss of 1 %.",
            show_default=False,
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help=f"File for the chart of the report [default: {_PICTURE} in FOLDER or the working folder].",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the report as JSON to this file.", show_default=False)
    ] = None,
    int4_group: Annotated[
        int, typer.Option(help="Group size of int4: input features that share a scale; 32, 64 or 128.")
    ] = 32,
    tokens: Annotated[
        int, typer.Option(min=1, help="Number of tokens of the text to measure the report on.")
    ] = 4096,
    threads: Annotated[int | None, options.threads()] = None,
) -> None:
    """Quantize a transformers model that reads text, and write its packed weights, config and tokenizer like `pack`.

    hf-cpu-accel quantize HuggingFaceTB/SmolLM2-360M-Instruct ./smollm2-int4 --calibration some.txt --report
    """
    from rich.console import Console

    from hf_cpu_accel.cli.pack import write
    from hf_cpu_accel.cli.tables import wide_console
    from hf_cpu_accel.runtime.threads import apply_threads

    try:
        settings = _settings(dtype, int4_group, folder, model, size, accuracy)
        text = _text(calibration)
        reports = report or any(value is not None for value in (size, accuracy, picture, json))
        picture = _picture(picture, folder) if reports else None
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if folder is None and picture is None:
        raise typer.BadParameter("nothing to do: pass a FOLDER to write, or --report")
    apply_threads(threads)
    console = Console(highlight=False)
    try:
        start = time.perf_counter()
        loaded, tokenizer = _load(model, console)
        seconds = time.perf_counter() - start
        results = None
        if picture is not None:
            results = _measure(loaded, tokenizer, text, settings, calibration is not None, tokens, console)
            results = _with_proposal(results, model, size, accuracy)
            _print(results, wide_console(), picture, json)
            if results.asked and results.chosen is None:
                raise ValueError(
                    f"no mix of dtypes has {results.asked}, so nothing is written; pass a larger --size or a lower --accuracy"
                )
        if folder is not None:
            rounding = _rounding(text, tokenizer, settings, calibration is not None)
            mixed = {} if results is None or results.chosen is None else {"dtypes": results.exceptions()}
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
        raise ValueError(f"--dtype {dtype} is not supported; accepted are {' and '.join(_FINER)}")
    if split_path(model) is not None:
        raise ValueError(f"{model} is already quantized: use `pack`, or quantize the original model")
    if folder is not None:
        check_folder(model, folder)
    if size is not None and accuracy is not None:
        raise ValueError(f"--size {size:g} and --accuracy {accuracy:g} exclude each other: pass one of them")
    if accuracy is not None and not 0 < accuracy < 1:
        raise ValueError(f"--accuracy {accuracy}: expected more than 0 and less than 1, such as 0.99")
    return CPUAccelConfig(dtype=dtype, int4_group=int4_group)


def _text(calibration: Path | None) -> str:
    """Return the text of the file, or built-in sentences without a file.

    Raises:
        ValueError: the file is empty.
        OSError: the file cannot be read.
    """
    from importlib import resources

    if calibration is not None:
        text = calibration.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError(f"--calibration {calibration} is empty: expected a file with text")
        return text
    return resources.files("hf_cpu_accel.cli").joinpath("demo_sentences.txt").read_text(encoding="utf-8")


def _picture(picture: Path | None, folder: Path | None) -> Path:
    from hf_cpu_accel.cli.bench.report import CHART_SUFFIXES

    path = picture or (folder or Path()) / _PICTURE
    if path.suffix not in CHART_SUFFIXES:
        raise ValueError(f"--picture {path}: accepted suffixes are {', '.join(CHART_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--report needs matplotlib: pip install matplotlib")
    return path


def _load(model: str, console: Console) -> tuple[Any, Any]:
    """Load the model, without gradients, and its tokenizer."""
    from transformers import AutoTokenizer

    from hf_cpu_accel.cli.pack import load

    with console.status(f"loading {model}"):
        return load(model).requires_grad_(False), AutoTokenizer.from_pretrained(model)


def _rounding(text: str, tokenizer: Any, settings: CPUAccelConfig, calibrated: bool) -> dict[str, Any]:
    """Return the options of `accelerate_for_cpu` that calibrate weights on the text."""
    return {"calibration": [text], "tokenizer": tokenizer} if calibrated and settings.dtype == "int4" else {}


def _measure(
    model: Any,
    tokenizer: Any,
    text: str,
    settings: CPUAccelConfig,
    calibrated: bool,
    tokens: int,
    console: Console,
) -> Report:
    """Measure the loss of each linear in `settings.dtype` and in mixes of dtypes."""
    from rich.progress import Progress

    from hf_cpu_accel.api import accelerated
    from hf_cpu_accel.cli.quantize.measure import ReferenceOutputs, measure, packed_linears, steps
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
    reference = ReferenceOutputs(model, calls)
    with accelerated(model, dtype=dtype, **fields, **rounding):
        packed, model_loss = {dtype: packed_linears(model)}, reference.loss(model)
    for finer in _FINER[dtype]:
        with accelerated(model, dtype=finer, **fields):
            packed[finer] = packed_linears(model)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("measuring each linear", total=steps(calls))
        losses = measure(model, calls, packed, lambda: progress.advance(bar))
    model.to(loaded_as)
    unit = "nats" if reference.of_logits else "1 - cosine"
    return Report("", dtype, unit, model_loss, losses, mixes(losses), None, "")


def _with_proposal(report: Report, model: str, size: float | None, accuracy: float | None) -> Report:
    from dataclasses import replace

    from hf_cpu_accel.cli.quantize.mix import proposal

    title = f"{Path(model).name}: {report.dtype}"
    if size is None and accuracy is None:
        return replace(report, title=title)
    loss = None if accuracy is None else -math.log(accuracy)
    asked = f"at most {size:g} MB" if size is not None else f"accuracy {accuracy:g}"
    chosen = proposal(report.mixes, nbytes=None if size is None else size * 1e6, loss=loss)
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
