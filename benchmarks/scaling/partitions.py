"""Compare layer-wise GNN inference by two processes with one process of one and of two threads, from files to files.

python -m benchmarks.scaling.partitions [--graph arxiv] [--features 128] [--record]

The graph is R-MAT with the nodes and edges of ogbn-arxiv. Systems take turns; the best round of each counts.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch_geometric.nn as pyg
import typer

from benchmarks import quiet
from benchmarks.gnn.graphs import SIZES, rmat
from benchmarks.scaling.measured import record as keep
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.cli.tables import results_table, wide_console
from hf_cpu_accel.graph import inference

# Processes, and torch's threads, which they share.
SYSTEMS = {
    "one process, 1 thread": (1, 1),
    "one process, 2 threads": (1, 2),
    "two processes, 1 thread each": (2, 2),
}
MODELS = {"GCN": pyg.GCN, "GraphSAGE": pyg.GraphSAGE, "GAT": pyg.GAT}


def main(
    graph: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "arxiv",
    features: Annotated[int, typer.Option(help="Features of each node and layer.")] = 128,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 3,
    record: Annotated[bool, typer.Option("--record", help="Record the numbers for the cost model.")] = False,
) -> None:
    """Measure, and print a table."""
    edge_index = rmat(*SIZES[graph])
    nodes = SIZES[graph][0]
    table = results_table(["", *(f"{name}, s" for name in SYSTEMS), "greatest difference"])
    with tempfile.TemporaryDirectory() as folder, quiet.exclusive():
        x = _mapped(Path(folder) / "x", nodes, features)
        for name, make in MODELS.items():
            model = accelerate_for_cpu(make(features, features, 3, out_channels=40).eval(), dtype="float32")
            seconds, difference = _compare(model, x, edge_index, Path(folder) / "out", rounds)
            table.add_row(name, *(f"{taken:.2f}" for taken in seconds.values()), f"{difference:.1e}")
            if record:
                one, threads, two = seconds.values()
                keep(f"partitions, {name}", {"one_s": one, "threads_s": threads, "two_s": two})
    wide_console().print(table)


def _compare(
    model: Any, x: torch.Tensor, edge_index: torch.Tensor, out: Path, rounds: int
) -> tuple[dict[str, float], float]:
    """Return the seconds of each system, and the deviation of its embeddings from those of the whole graph."""
    torch.set_num_threads(2)
    with torch.no_grad():
        whole = model(x, edge_index)
    taken: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    worst = 0.0
    for _ in range(rounds):
        for name, (processes, threads) in SYSTEMS.items():
            torch.set_num_threads(threads)
            start = time.perf_counter()
            output = inference(model, x, edge_index, processes=processes, out=out)
            taken[name].append(time.perf_counter() - start)
            worst = max(worst, float((output - whole).abs().max()))
    return {name: min(each) for name, each in taken.items()}, worst


def _mapped(file: Path, nodes: int, features: int) -> torch.Tensor:
    written = np.memmap(file, np.float32, "w+", shape=(nodes, features))
    written[:] = np.random.default_rng(0).standard_normal((nodes, features), dtype=np.float32)
    return torch.from_numpy(written)


if __name__ == "__main__":
    typer.run(main)
