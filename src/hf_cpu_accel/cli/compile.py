"""`hf-cpu-accel compile`: compile the unfused blocks of a model, and store the artifacts for later processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_cpu_accel.cli import options
from hf_cpu_accel.cli.failures import cannot_load

if TYPE_CHECKING:
    from rich.console import Console

    from hf_cpu_accel.plan import CompiledRegion

# The command imports torch when it runs, so that `hf-cpu-accel --help` does not wait for it.

_CALLS = 60  # the most calls to wait for the end of measuring


def compile_model(
    model: options.Model = None,
    report: Annotated[bool, typer.Option("--report", help="Also print the ops of each graph.")] = False,
    task: Annotated[
        str, typer.Option(help="Task, which decides the head of the model.")
    ] = "feature-extraction",
    dtype: Annotated[str, options.dtype()] = "auto",
    batch: Annotated[
        int, typer.Option(min=1, help="Sequences per call; 1 and 2 or more are compiled separately.")
    ] = 1,
    seq: Annotated[
        int, typer.Option(min=1, help="Tokens per sequence; later calls may have any number.")
    ] = 128,
    alone: Annotated[
        bool, typer.Option("--alone", help="Replace no modules; compile all blocks of the model.")
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(
            help="Copy the artifacts into this folder, for machines of the same kind.", show_default=False
        ),
    ] = None,
    random_config: Annotated[str | None, options.random_config()] = None,
    threads: Annotated[
        int | None,
        options.threads(
            "Number of threads that the code is compiled for [default: chosen for the machine; see doctor]."
        ),
    ] = None,
) -> None:
    """Compile the unfused blocks of a text encoder, print the results, and store the artifacts for later processes.

    hf-cpu-accel compile --random-config deberta-v3-small --report
    """
    import time

    import torch

    from hf_cpu_accel.api import accelerate_for_cpu, explain
    from hf_cpu_accel.cli.bench.workload import workload
    from hf_cpu_accel.cli.tables import wide_console
    from hf_cpu_accel.compiler.background import artifacts
    from hf_cpu_accel.compiler.background.attach import libraries_of
    from hf_cpu_accel.patching.acceleration import acceleration_of

    try:
        source = workload(model, random_config, task, batch, seq)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console = wide_console()
    console.highlighter = None  # type: ignore[assignment]
    try:
        with console.status(f"loading {source.title}") as status:
            built = (source.blocks or source.build)()
            example = source.inputs(built)
            skip = ("*",) if alone else ()
            accelerate_for_cpu(
                built, dtype=dtype, compile="now", threads=threads, originals="drop", skip_modules=skip
            )
            status.update("compiling (about half a minute)")
            start = time.perf_counter()
            source.forward(built, example)
            took = time.perf_counter() - start
            for _ in range(_CALLS):
                if all(region.state != "measuring" for region in explain(built).compiled):
                    break
                source.forward(built, example)
    except OSError as error:
        raise cannot_load(console, source.title, error, random_config=True) from error
    except ValueError as error:
        console.print(f"{source.title}: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    plan = explain(built)
    console.print(
        f"[bold]{source}[/bold]: {plan.dtype}, {len(plan.replaced)} modules replaced, first call {took:.1f} s, "
        f"{torch.get_num_threads()} threads"
    )
    if not plan.compiled:
        console.print(f"compile {plan.compile_state}")
        return
    console.print(_table(plan.compiled))
    console.print(f"{plan.recompiles} recompiles", style="dim")
    if bundle is not None:
        acceleration = acceleration_of(built)
        assert acceleration is not None
        copied = artifacts.export(libraries_of(acceleration), bundle)
        console.print(
            f"{copied} libraries in {bundle}; load them with compiled_bundle=..., trust_compiled=True"
        )
    if report:
        for region in plan.compiled:
            _print_graph(console, region)


def _table(regions: Sequence[CompiledRegion]) -> object:
    from hf_cpu_accel.cli.tables import colored_ratio, results_table

    out = results_table(("region", "blocks", "state", "speedup", "graphs", "from disk", "CPU-s", "reason"))
    for region in regions:
        out.add_row(
            region.name,
            str(region.blocks),
            region.state,
            ", ".join(colored_ratio(gain) for gain in region.gains) or "-",
            str(region.graphs),
            str(region.cached),
            f"{region.cpu_seconds:.1f}",
            region.reason or "",
        )
    return out


def _print_graph(console: Console, region: CompiledRegion) -> None:
    """Print the matches of the passes and the ops of the region's first graph. Only blocks that are one graph are compiled."""
    console.print(f"\n[bold]{region.name}[/bold]")
    if not region.graphs:
        console.print("  no graph")
        return
    for title, counts in (
        ("rewrites", region.rewrites),
        ("our ops", region.ours),
        ("generated", region.rest),
    ):
        matches = {name: count for name, count in counts.items() if count}
        text = ", ".join(
            f"{name} {count}" for name, count in sorted(matches.items(), key=lambda item: -item[1])
        )
        console.print(f"  {title}: {text or 'none'}", markup=False)
