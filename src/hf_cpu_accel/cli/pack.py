"""`hf-cpu-accel pack`: a model as a folder of packed weights, which loads in a second and is shared by processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_cpu_accel.cli import options
from hf_cpu_accel.cli.failures import cannot_load

if TYPE_CHECKING:
    from rich.console import Console

    from hf_cpu_accel.config import CPUAccelConfig

# torch and everything on it is imported inside the command: `hf-cpu-accel --help` must not wait for it.


def pack(
    model: Annotated[str, typer.Argument(help="Model id, local folder or GGUF file.", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="As accelerate_for_cpu takes it.")] = "auto",
    accuracy: Annotated[float | None, options.accuracy()] = None,
    int4_group: Annotated[
        int, typer.Option(help="Input features of an int4 weight that share a multiplier: 32, 64 or 128.")
    ] = 32,
    threads: Annotated[
        int | None, options.threads("Threads to pack with [default: what doctor says].")
    ] = None,
) -> None:
    """Accelerate a model of transformers and write its packed weights, config and tokenizer.

    hf-cpu-accel pack HuggingFaceTB/SmolLM2-360M-Instruct ./smollm2-int8 --dtype int8

    Afterwards `AutoModel....from_pretrained("./smollm2-int8")` maps the file, wherever hf_cpu_accel is imported.
    """
    from rich.console import Console

    from hf_cpu_accel.config import CPUAccelConfig

    try:
        settings = CPUAccelConfig(
            dtype=dtype, accuracy=accuracy, int4_group=int4_group, threads=threads, originals="drop"
        )
        check_folder(model, folder)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console = Console(highlight=False)
    try:
        start = time.perf_counter()
        with console.status(f"loading {model}"):
            loaded = load(model)
        write(console, model, loaded, folder, settings, {"load": time.perf_counter() - start})
    except OSError as error:
        raise cannot_load(console, model, error) from error
    except (ValueError, RuntimeError) as error:
        console.print(f"{model}: {error}", style="red", markup=False)
        raise typer.Exit(1) from error


def check_folder(model: str, folder: Path) -> None:
    """
    Raises:
        ValueError: `folder` is a file, or where the model is.
    """
    if folder.is_file() or (Path(model).is_dir() and folder.resolve() == Path(model).resolve()):
        raise ValueError(f"FOLDER={str(folder)!r}: expected a folder of its own")


def write(
    console: Console,
    model: str,
    loaded: Any,
    folder: Path,
    settings: CPUAccelConfig,
    seconds: dict[str, float],
    **options: Any,
) -> None:
    """Accelerate `loaded`, which is `model`, write it, and tell how long that took; `options` are of `accelerate_for_cpu`."""
    from hf_cpu_accel.api import accelerate_for_cpu
    from hf_cpu_accel.frontends.packed_saving import save_packed

    source = sum(parameter.nbytes for parameter in loaded.parameters())
    console.print(f"packing {source / 1e9:.2f} GB")
    start = time.perf_counter()
    accelerate_for_cpu(loaded, settings, **options)
    seconds["pack"] = time.perf_counter() - start
    start = time.perf_counter()
    with console.status(f"writing {folder}"):
        written = save_packed(loaded, folder)
        seconds["write"] = time.perf_counter() - start
        companions = _save_companions(model, folder)
    _report(console, loaded, source, written, seconds)
    beside = f", {' and '.join(companions)} beside it" if companions else ""
    console.print(f"[bold]{folder}[/bold]: one file of weights{beside}")


def load(model: str) -> Any:
    """By the class that its config.json names; a GGUF file as the causal language model that it is, in its blocks."""
    import transformers
    from transformers import AutoConfig

    from hf_cpu_accel.cli.loading import blocks_of
    from hf_cpu_accel.frontends.quantized_folders import METHODS, weights_as_stored

    blocks = blocks_of(model, "AutoModelForCausalLM")
    if blocks is not None:
        return blocks()
    config = AutoConfig.from_pretrained(model)
    said = getattr(config, "quantization_config", None)
    if said is not None and said.get("quant_method") not in METHODS:
        raise ValueError("its weights are quantized already: pack the checkpoint that they were made of")
    named = (config.architectures or ["AutoModel"])[0]
    cls = getattr(transformers, named, transformers.AutoModel)
    with weights_as_stored():
        return cls.from_pretrained(model, config=config, dtype="auto").eval()


def _save_companions(model: str, folder: Path) -> list[str]:
    """What turns texts, images and sound into inputs, where the model has it; the names of what was written."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer

    from hf_cpu_accel.frontends.gguf import located

    name, options = located(model)
    kinds = (
        (AutoTokenizer,)
        if options
        else (AutoProcessor, AutoTokenizer, AutoImageProcessor, AutoFeatureExtractor)
    )
    for cls in kinds:
        try:
            companion = cls.from_pretrained(name, **options)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the model has none of this kind
        companion.save_pretrained(folder)
        return [type(companion).__name__]
    return []


def _report(console: Console, model: Any, source: int, written: int, seconds: dict[str, float]) -> None:
    from hf_cpu_accel.api import explain
    from hf_cpu_accel.cli.tables import results_table

    plan = explain(model)
    console.print(f"{type(model).__name__}, {plan.dtype}")
    for choice in plan.choices:
        console.print(str(choice), markup=False)
    table = results_table(["", "MB", "seconds", "GB/s"])
    for name, nbytes in (("load", source), ("pack", source), ("write", written)):
        rate = nbytes / 1e9 / max(seconds[name], 1e-9)
        table.add_row(name, f"{nbytes / 1e6:.1f}", f"{seconds[name]:.2f}", f"{rate:.2f}")
    console.print(table)
    console.print(
        f"{len(plan.replaced)} modules packed or fused, {len(plan.left)} left; {source / max(written, 1):.1f} times smaller"
    )
