"""Graph neural networks against stock PyTorch Geometric and torch.sparse: python -m benchmarks.gnn [--graph arxiv|reddit|batch]

Systems take turns. THP_MEM_ALLOC_ENABLE=1 gives torch's own tensors huge pages, from which the
stock paths gain most: run with it and without. --nodes and --edges make a graph of any size.
"""

from __future__ import annotations

import os
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.gnn_cases import Systems, aggregation_cases, gradient_cases, model_cases
from benchmarks.gnn_graphs import SIZES, rmat
from hf_cpu_accel.measure import PeakMemory, interleaved
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
    nodes: Annotated[int, typer.Option(help="of a graph of its own, with --edges")] = 0,
    edges: Annotated[int, typer.Option(help="of a graph of its own, with --nodes")] = 0,
    widths: Annotated[str, typer.Option(help="features of the aggregations")] = "64,128",
    only: Annotated[str, typer.Option(help="models")] = ",".join(_MODELS),
    what: Annotated[str, typer.Option(help=f"of: {', '.join(_KINDS)}")] = "aggregation,inference,training",
    compiled: Annotated[bool, typer.Option(help="stock under torch.compile, too")] = False,
    narrow: Annotated[bool, typer.Option(help="ours with bfloat16 features, too")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each system")] = 5,
) -> None:
    """Medians of stock PyTorch Geometric, torch.sparse and this package, side by side on this machine."""
    graph = _known("--graph", graph, tuple(SIZES))[0]
    kinds, names = _known("--what", what, _KINDS), _known("--only", only, _MODELS)
    if (nodes > 0) != (edges > 0):
        raise typer.BadParameter("--nodes and --edges: both make a graph, one alone does not")
    size = (nodes, edges) if nodes else SIZES[graph]
    edge_index = rmat(*size)
    sizes = [int(width) for width in widths.split(",")]
    pages = "huge pages for all" if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else "default allocator"
    console = Console(width=110)
    console.print(f"{size[0]} nodes, {size[1]} edges, {torch.get_num_threads()} threads, {pages}")
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
    if cases:
        console.print(times(cases, rounds))
    if "memory" in kinds:
        console.print(peaks(edge_index, size[0], names))


def times(cases: dict[str, Systems], rounds: int) -> Table:
    table = Table("case", "system", "ms", "against ours", box=None)
    for case, systems in cases.items():
        for run in systems.values():
            run()
        timings = interleaved(systems, rounds=rounds, calls=1, seconds=0.0)
        took = {system: timing.seconds.value for system, timing in timings.items()}
        for system, seconds in took.items():
            table.add_row(case, system, f"{1e3 * seconds:.1f}", f"{seconds / took['ours']:.2f}")
    return table


def peaks(edge_index: Tensor, nodes: int, names: list[str]) -> Table:
    """By how much inference raises the memory of the process, the graph being known already."""
    table = Table("case", "system", "MiB at most", "against ours", box=None)
    for case, systems in model_cases(edge_index, nodes, train=False, names=names).items():
        rose = {}
        for system, run in systems.items():
            run()
            release_buffers()
            with PeakMemory() as memory:
                run()
            rose[system] = memory.peak_bytes or 0
        for system, peak in rose.items():
            table.add_row(case, system, f"{peak / 2**20:.0f}", f"{peak / max(rose['ours'], 1):.2f}")
    return table


if __name__ == "__main__":
    typer.run(main)
