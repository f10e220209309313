"""`hf-cpu-accel pack`: write a folder of packed weights, which loads in a second and which processes share."""

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

# The command imports torch when it runs, so that `hf-cpu-accel --help` does not wait for it.


def pack(
    model: Annotated[str, typer.Argument(help="Model id, local folder or GGUF file.", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    dtype: Annotated[str, options.dtype()] = "auto",
    accuracy: Annotated[float | None, options.accuracy()] = None,
    int4_group: Annotated[
        int, typer.Option(help="Group size of int4: input features that share a scale; 32, 64 or 128.")
    ] = 32,
    threads: Annotated[
        int | None,
        options.threads("Number of threads to pack with [default: chosen for the machine; see doctor]."),
    ] = None,
) -> None:
    """Accelerate a transformers model and write its packed weights, config and tokenizer.

    hf-cpu-accel pack HuggingFaceTB/SmolLM2-360M-Instruct ./smollm2-int8 --dtype int8

    Afterwards `AutoModel....from_pretrained("./smollm2-int8")` maps the file, if hf_cpu_accel is imported.
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
    """Check that `folder` can be written without overwriting `model`.

    Raises:
        ValueError: `folder` is a file, or the folder of the model.
    """
    if folder.is_file() or (Path(model).is_dir() and folder.resolve() == Path(model).resolve()):
        raise ValueError(f"FOLDER={str(folder)!r} is a file or the folder of MODEL: expected another folder")


def write(
    console: Console,
    model: str,
    loaded: Any,
    folder: Path,
    settings: CPUAccelConfig,
    seconds: dict[str, float],
    **options: Any,
) -> None:
    """Accelerate a model, write it, and print the time of each step.

    Args:
        console: prints the report.
        model: the MODEL of the command line.
        loaded: the loaded model.
        folder: the folder to write.
        settings: the settings for `accelerate_for_cpu`.
        seconds: seconds of the steps so far, {"load": seconds}; "pack" and "write" are added.
        options: further arguments of `accelerate_for_cpu`.
    """
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
    extra = f", {' and '.join(companions)}" if companions else ""
    console.print(f"[bold]{folder}[/bold]: one file of weights{extra}")


def load(model: str) -> Any:
    """Load a model with the class that its config.json names, in eval mode; a GGUF file as a causal language model in its blocks.

    Raises:
        ValueError: the weights are already quantized in a format that cannot be packed.
    """
    import transformers
    from transformers import AutoConfig

    from hf_cpu_accel.cli.loading import blocks_of
    from hf_cpu_accel.frontends.quantized_folders import METHODS, weights_as_stored

    blocks = blocks_of(model, "AutoModelForCausalLM")
    if blocks is not None:
        return blocks()
    config = AutoConfig.from_pretrained(model)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and quantization.get("quant_method") not in METHODS:
        raise ValueError(
            f"its weights are already quantized (quant_method={quantization.get('quant_method')!r}); accepted are "
            f"{', '.join(METHODS)}; or pack the original checkpoint"
        )
    named = (config.architectures or ["AutoModel"])[0]
    cls = getattr(transformers, named, transformers.AutoModel)
    with weights_as_stored():
        return cls.from_pretrained(model, config=config, dtype="auto").eval()


def _save_companions(model: str, folder: Path) -> list[str]:
    """Save the tokenizer or processor of the model, and return its class name; an empty list if it has none."""
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
    table = results_table(["step", "MB", "seconds", "GB/s"])
    for name, nbytes in (("load", source), ("pack", source), ("write", written)):
        rate = nbytes / 1e9 / max(seconds[name], 1e-9)
        table.add_row(name, f"{nbytes / 1e6:.1f}", f"{seconds[name]:.2f}", f"{rate:.2f}")
    console.print(table)
    console.print(
        f"{len(plan.replaced)} modules packed or fused, {len(plan.left)} left; {source / max(written, 1):.1f}x smaller"
    )
