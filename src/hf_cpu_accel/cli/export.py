"""`hf-cpu-accel export`: export a model into one compiled file that runs without Python."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hf_cpu_accel.cli import options
from hf_cpu_accel.cli.failures import cannot_load

# The command imports torch when it runs, so that `hf-cpu-accel --help` does not wait for it.


def export(
    aot: Annotated[Path, typer.Option(help="File to write; its name ends in .pt2.", show_default=False)],
    model: options.Model = None,
    task: Annotated[
        str, typer.Option(help="Task, which decides the head of the model.")
    ] = "feature-extraction",
    dtype: Annotated[str, options.dtype()] = "auto",
    accuracy: Annotated[float | None, options.accuracy()] = None,
    batch: Annotated[
        int, typer.Option(min=2, help="Sequences of the example; later calls may have any number.")
    ] = 2,
    seq: Annotated[
        int, typer.Option(min=2, help="Tokens per sequence of the example; later calls may have any number.")
    ] = 128,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Write the inputs of the example to this file, for the C++ runner.", show_default=False
        ),
    ] = None,
    random_config: Annotated[str | None, options.random_config()] = None,
    threads: Annotated[
        int | None,
        options.threads(
            "Number of threads of the final comparison [default: chosen for the machine; see doctor]."
        ),
    ] = None,
) -> None:
    """Accelerate a text encoder and compile its forward pass into a file for Python and C++ (see integrations/cpp).

    hf-cpu-accel export --random-config all-MiniLM-L6-v2 --dtype int8 --aot minilm.pt2 --inputs inputs.pt
    """
    import torch
    from rich.console import Console

    from hf_cpu_accel.api import accelerate_for_cpu, explain
    from hf_cpu_accel.check import float_tensors
    from hf_cpu_accel.cli.bench.command import check_writable
    from hf_cpu_accel.cli.bench.workload import workload
    from hf_cpu_accel.compiler.aot import export_aot, load_aot
    from hf_cpu_accel.measure import compare, interleaved
    from hf_cpu_accel.runtime.threads import apply_threads

    try:
        if task == "sentence-similarity":
            raise ValueError(
                "task='sentence-similarity' cannot be exported; use feature-extraction and pool its outputs"
            )
        source = workload(model, random_config, task, batch, seq)
        check_writable(inputs, "--inputs")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console = Console(highlight=False)
    apply_threads(threads)
    try:
        with console.status(f"loading {source.title}") as status:
            built = (source.blocks or source.build)()
            example = source.inputs(built)
            accelerate_for_cpu(built, dtype=dtype, accuracy=accuracy, threads=threads, originals="drop")
            status.update("compiling (about half a minute)")
            start = time.perf_counter()
            written = export_aot(built, example, aot)
            took = time.perf_counter() - start
            status.update("checking")
            compiled = load_aot(written)
    except OSError as error:
        raise cannot_load(console, source.title, error, random_config=True) from error
    except (ValueError, RuntimeError) as error:
        console.print(f"{source.title}: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    if inputs is not None:
        torch.save(example, inputs)

    systems = {
        "Python": lambda: float_tensors(built(**example)),
        "file": lambda: float_tensors(compiled(**example)),
    }
    with torch.inference_mode():
        agreement = compare(systems["file"](), systems["Python"]())
        timings = interleaved(systems, rounds=5, seconds=0.05)
    console.print(
        f"[bold]{written}[/bold], {written.stat().st_size / 1e6:.1f} MB, {explain(built).dtype}, compiled in {took:.0f} s"
    )
    console.print(
        f"{batch} x {seq} tokens: file {1e3 * timings['file'].seconds.value:.2f} ms, model in Python "
        f"{1e3 * timings['Python'].seconds.value:.2f} ms; lowest cosine {agreement.worst_cosine:.6f}"
    )
    if inputs is not None:
        console.print(f"example inputs: {inputs}")
