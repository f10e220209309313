"""Graph neural networks against stock PyTorch Geometric and torch.sparse: python -m benchmarks.gnn [--graph arxiv|reddit|batch]

Systems take turns. THP_MEM_ALLOC_ENABLE=1 gives torch's own tensors huge pages, from which the
stock paths gain most: run with it and without.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.gnn_graphs import SIZES, rmat
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.graph.cache import adjacencies
from hf_cpu_accel.measure import interleaved
from hf_cpu_accel.ops.sparse import coo_to_csr, spmm_reduce

Systems = dict[str, Callable[[], object]]


_KINDS = ("aggregation", "inference", "training")
_MODELS = ("GCN", "SAGE", "GIN", "GAT", "GATv2")


def aggregation_cases(edge_index: Tensor, nodes: int, widths: list[int]) -> dict[str, Systems]:
    """x -> sum, mean or max over neighbours; PyG's gather and scatter, torch.sparse, and ours in float32 and bfloat16."""
    source, target = edge_index
    rowptr, col, _ = coo_to_csr(target, source, nodes, nodes)
    matrix = torch.sparse_csr_tensor(rowptr.long(), col.long(), torch.ones(len(col)), size=(nodes, nodes))
    narrow = torch.sparse_csr_tensor(
        rowptr.long(), col.long(), torch.ones(len(col), dtype=torch.bfloat16), size=(nodes, nodes)
    )
    cases: dict[str, Systems] = {
        "COO to CSR": {
            "argsort": lambda: torch.argsort(target),
            "ours": lambda: coo_to_csr(target, source, nodes, nodes),
        }
    }
    with torch.no_grad():
        for width in widths:
            x = torch.randn(nodes, width)
            half = x.bfloat16()
            for reduce, scatter in (("sum", "sum"), ("mean", "mean"), ("max", "amax")):
                cases[f"{reduce} K={width}"] = {
                    "scatter": lambda x=x, s=scatter: _scatter(x, source, target, nodes, s),
                    "torch.sparse.mm": lambda x=x, r=reduce: torch.sparse.mm(
                        matrix, x, "amax" if r == "max" else r
                    ),
                    "ours": lambda x=x, r=reduce: spmm_reduce(rowptr, col, None, x, r),
                }
            cases[f"sum bfloat16 K={width}"] = {
                "torch.sparse.mm": lambda x=half: torch.sparse.mm(narrow, x, "sum"),
                "ours": lambda x=half: spmm_reduce(rowptr, col, None, x),
            }
    return cases


def _scatter(x: Tensor, source: Tensor, target: Tensor, nodes: int, reduce: str) -> Tensor:
    messages = x.index_select(0, source)
    output = x.new_zeros(nodes, x.shape[1])
    if reduce == "sum":
        return output.scatter_add_(0, target.unsqueeze(1).expand_as(messages), messages)
    index = target.unsqueeze(1).expand_as(messages)
    return output.scatter_reduce_(0, index, messages, reduce, include_self=False)


class Net(nn.Module):
    """Two layers with a ReLU between them: 128 -> 128 -> 40."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def models() -> dict[str, Net]:
    import torch_geometric.nn as pyg

    def mlp(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, outputs))

    return {
        "GCN": Net(pyg.GCNConv(128, 128), pyg.GCNConv(128, 40)),
        "SAGE": Net(pyg.SAGEConv(128, 128), pyg.SAGEConv(128, 40)),
        "GIN": Net(pyg.GINConv(mlp(128, 128)), pyg.GINConv(mlp(128, 40))),
        "GAT": Net(pyg.GATConv(128, 32, heads=4), pyg.GATConv(128, 40)),
        "GATv2": Net(pyg.GATv2Conv(128, 32, heads=4), pyg.GATv2Conv(128, 40)),
    }


def model_cases(edge_index: Tensor, nodes: int, *, train: bool, names: list[str]) -> dict[str, Systems]:
    """Whole models, stock on edge_index and on a sparse matrix, and accelerated with the graph kept or sorted anew in each call."""
    x, labels = torch.randn(nodes, 128), torch.randint(0, 40, (nodes,))
    rowptr, col, _ = coo_to_csr(edge_index[1], edge_index[0], nodes, nodes)
    ones = torch.ones(len(col))
    matrix = torch.sparse_csr_tensor(rowptr.long(), col.long(), ones, size=(nodes, nodes))
    cases: dict[str, Systems] = {}
    for name, model in models().items():
        if name not in names:
            continue
        stock = model.train(train)
        ours = accelerate_for_cpu(copy.deepcopy(model), dtype="float32")
        step = _training_step if train else _inference

        def anew(ours: nn.Module = ours, step: Callable[..., object] = step) -> object:
            adjacencies.clear()
            return step(ours, x, edge_index, labels)

        cases[f"{name} {'training step' if train else 'inference'}"] = {
            "PyG edge_index": lambda m=stock, s=step: s(m, x, edge_index, labels),
            "PyG sparse CSR": lambda m=stock, s=step: s(m, x, matrix, labels),
            "ours": lambda m=ours, s=step: s(m, x, edge_index, labels),
            "ours, new graph": anew,
        }
    return cases


def _inference(model: nn.Module, x: Tensor, edges: Tensor, labels: Tensor) -> None:
    with torch.no_grad():
        model(x, edges)


def _training_step(model: nn.Module, x: Tensor, edges: Tensor, labels: Tensor) -> None:
    model.zero_grad()
    nn.functional.cross_entropy(model(x, edges), labels).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=1e-3)


def _known(option: str, values: str, accepted: tuple[str, ...]) -> list[str]:
    wanted = values.split(",")
    unknown = [value for value in wanted if value not in accepted]
    if unknown:
        raise typer.BadParameter(f"{option}: {unknown} are not known; accepted: {', '.join(accepted)}")
    return wanted


def main(
    graph: Annotated[str, typer.Option(help=", ".join(SIZES))] = "arxiv",
    widths: Annotated[str, typer.Option(help="features of the aggregations")] = "64,128",
    only: Annotated[str, typer.Option(help="models")] = ",".join(_MODELS),
    what: Annotated[str, typer.Option(help=f"of: {', '.join(_KINDS)}")] = ",".join(_KINDS),
    rounds: Annotated[int, typer.Option(min=1, help="turns of each system")] = 5,
) -> None:
    """Medians of stock PyTorch Geometric, torch.sparse and this package, side by side on this machine."""
    graph = _known("--graph", graph, tuple(SIZES))[0]
    kinds, names = _known("--what", what, _KINDS), _known("--only", only, _MODELS)
    nodes, edges = SIZES[graph]
    edge_index = rmat(nodes, edges)
    pages = "huge pages for all" if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else "default allocator"
    table = Table("case", "system", "ms", "against ours", box=None)
    cases: dict[str, Systems] = {}
    if "aggregation" in kinds:
        cases |= aggregation_cases(edge_index, nodes, [int(width) for width in widths.split(",")])
    for kind in ("inference", "training"):
        if kind in kinds:
            cases |= model_cases(edge_index, nodes, train=kind == "training", names=names)
    for case, systems in cases.items():
        for run in systems.values():
            run()
        timings = interleaved(systems, rounds=rounds, calls=1, seconds=0.0)
        times = {system: timing.seconds.value for system, timing in timings.items()}
        for system, took in times.items():
            table.add_row(case, system, f"{1e3 * took:.1f}", f"{took / times['ours']:.2f}")
    console = Console(width=110)
    console.print(f"{graph}: {nodes} nodes, {edges} edges, {torch.get_num_threads()} threads, {pages}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
