"""Graph neural networks against stock PyTorch Geometric and torch.sparse: python -m benchmarks.gnn [--graph arxiv|reddit|batch]

Systems take turns. THP_MEM_ALLOC_ENABLE=1 gives torch's own tensors huge pages, which helps the
stock paths most: run with it and without. --nodes and --edges make a graph of any size.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from benchmarks.gnn.cases import Systems, aggregation_cases, gradient_cases, model_cases, timings_of
from benchmarks.gnn.graphs import SIZES, rmat
from hf_cpu_accel.measure import PeakMemory
from hf_cpu_accel.runtime.memory import release_buffers

_KINDS = ("aggregation", "gradient", "inference", "training", "memory")
_MODELS = ("GCN", "SAGE", "GIN", "GAT", "GATv2", "RGCN", "PNA")


def _known(option: str, values: str, accepted: tuple[str, ...]) -> list[str]:
    wanted = values.split(",")
    unknown = [value for value in wanted if value not in accepted]
    if unknown:
        raise typer.BadParameter(f"{option}: {unknown} are not known; accepted: {', '.join(accepted)}")
    return wanted


def main(
    graph: Annotated[str, typer.Option(help=", ".join(SIZES))] = "arxiv",
    nodes: Annotated[int, typer.Option(help="nodes of a custom graph, with --edges")] = 0,
    edges: Annotated[int, typer.Option(help="edges of a custom graph, with --nodes")] = 0,
    widths: Annotated[str, typer.Option(help="features of the aggregations")] = "64,128",
    only: Annotated[str, typer.Option(help="models")] = ",".join(_MODELS),
    what: Annotated[str, typer.Option(help=f"of: {', '.join(_KINDS)}")] = "aggregation,inference,training",
    compiled: Annotated[bool, typer.Option(help="also measure stock under torch.compile")] = False,
    narrow: Annotated[bool, typer.Option(help="also measure ours with bfloat16 features")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each system")] = 5,
) -> None:
    """Print medians of stock PyTorch Geometric, torch.sparse and this package, side by side on this machine."""
    graph = _known("--graph", graph, tuple(SIZES))[0]
    kinds, names = _known("--what", what, _KINDS), _known("--only", only, _MODELS)
    if (nodes > 0) != (edges > 0):
        raise typer.BadParameter("--nodes and --edges: both make a graph, one alone does not")
    size = (nodes, edges) if nodes else SIZES[graph]
    edge_index = rmat(*size)
    sizes = [int(width) for width in widths.split(",")]
    pages = "huge pages for all" if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else "default allocator"
    print(f"{size[0]} nodes, {size[1]} edges, {torch.get_num_threads()} threads, {pages}")
    cases: dict[str, Systems] = {}
    if "aggregation" in kinds:
        cases |= aggregation_cases(edge_index, size[0], sizes)
    if "gradient" in kinds:
        cases |= gradient_cases(edge_index, size[0], sizes)
    for kind in ("inference", "training"):
        if kind in kinds:
            train = kind == "training"
            cases |= model_cases(
                edge_index, size[0], train=train, names=names, narrow=narrow and not train, compiled=compiled
            )
    for case, systems in cases.items():
        report(case, times(systems, rounds), "ms")
    if "memory" in kinds:
        for case, systems in model_cases(edge_index, size[0], train=False, names=names).items():
            report(case, {system: peak(run) for system, run in systems.items()}, "MiB at most")


def report(case: str, measured: dict[str, float], unit: str) -> None:
    """Print a line per system when it is measured: whole tables take minutes."""
    for system, value in measured.items():
        ratio = value / max(measured["ours"], 1e-9)
        print(f"{case:26} {system:18} {value:9.1f} {unit:12} {ratio:6.2f} x ours", flush=True)


def times(systems: Systems, rounds: int) -> dict[str, float]:
    """Return milliseconds, medians of turns."""
    return {system: 1e3 * timing.seconds.value for system, timing in timings_of(systems, rounds).items()}


def peak(run: Callable[[], object]) -> float:
    """Return the MiB by which a call raises the memory of the process, after a first call has filled its caches."""
    run()
    release_buffers()
    with PeakMemory() as memory:
        run()
    return (memory.peak_bytes or 0) / 2**20


if __name__ == "__main__":
    typer.run(main)
