"""The cases of `benchmarks.gnn`: aggregations alone, and whole models in inference and in a training step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.graph.cache import adjacencies
from hf_cpu_accel.measure import Timing, interleaved
from hf_cpu_accel.ops.sparse import coo_to_csr, csr_transpose, spmm_reduce

Systems = dict[str, Callable[[], object]]
RELATIONS = 8
COMPILED = "torch.compile"


def aggregation_cases(edge_index: Tensor, nodes: int, widths: list[int]) -> dict[str, Systems]:
    """x -> sum, mean or max over neighbors; PyG's gather and scatter, torch.sparse, and ours in float32 and bfloat16."""
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


def gradient_cases(edge_index: Tensor, nodes: int, widths: list[int]) -> dict[str, Systems]:
    """Return the same cases forward and backward, against the two fastest stock formats."""
    from torch_geometric import EdgeIndex

    rowptr, col, _ = coo_to_csr(edge_index[1], edge_index[0], nodes, nodes)
    transposed = csr_transpose(rowptr, col, nodes)
    matrix = torch.sparse_csr_tensor(rowptr.long(), col.long(), torch.ones(len(col)), size=(nodes, nodes))
    edges: Any = EdgeIndex(edge_index, sparse_size=(nodes, nodes)).sort_by("col").values
    edges.fill_cache_()
    cases: dict[str, Systems] = {}
    for width in widths:
        x, grad = torch.randn(nodes, width, requires_grad=True), torch.randn(nodes, width)

        def step(run: Callable[[], Tensor], x: Tensor = x, grad: Tensor = grad) -> None:
            x.grad = None
            run().backward(grad)

        for reduce in ("sum", "mean", "max"):
            name = "amax" if reduce == "max" else reduce
            systems: Systems = {
                "torch.sparse.mm": lambda x=x, r=name, step=step: step(lambda: torch.sparse.mm(matrix, x, r)),
                "ours": lambda x=x, r=reduce, step=step: step(
                    lambda: spmm_reduce(rowptr, col, None, x, r, transposed=transposed)
                ),
            }
            if reduce != "max":  # EdgeIndex scatters the gradient of a maximum, which takes seconds
                systems["EdgeIndex"] = lambda x=x, r=reduce, step=step: step(
                    lambda: edges.matmul(x, reduce=r, transpose=True)
                )
            cases[f"{reduce} K={width}, and gradient"] = systems
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

    def forward(self, x: Tensor, edge_index: Tensor, *edge_type: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, *edge_type).relu(), edge_index, *edge_type)


def models(edge_index: Tensor | None = None) -> dict[str, Net]:
    """By name; PNA, which scales by the degrees of the graph that it was made for, only with one."""
    import torch_geometric.nn as pyg

    def mlp(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, outputs))

    def pna(outputs: int, degrees: Tensor) -> nn.Module:
        scalers = ["identity", "amplification", "attenuation"]
        return pyg.PNAConv(128, outputs, ["mean", "min", "max", "std"], scalers, degrees)

    made = {
        "GCN": Net(pyg.GCNConv(128, 128), pyg.GCNConv(128, 40)),
        "SAGE": Net(pyg.SAGEConv(128, 128), pyg.SAGEConv(128, 40)),
        "GIN": Net(pyg.GINConv(mlp(128, 128)), pyg.GINConv(mlp(128, 40))),
        "GAT": Net(pyg.GATConv(128, 32, heads=4), pyg.GATConv(128, 40)),
        "GATv2": Net(pyg.GATv2Conv(128, 32, heads=4), pyg.GATv2Conv(128, 40)),
        "RGCN": Net(pyg.RGCNConv(128, 128, RELATIONS), pyg.RGCNConv(128, 40, RELATIONS)),
    }
    if edge_index is not None:
        degrees = torch.bincount(torch.bincount(edge_index[1]))
        made["PNA"] = Net(pna(128, degrees), pna(40, degrees))
    return made


def model_cases(
    edge_index: Tensor,
    nodes: int,
    *,
    train: bool,
    names: list[str],
    narrow: bool = False,
    compiled: bool = False,
) -> dict[str, Systems]:
    """Whole models: stock on edge_index and on a sparse matrix, and accelerated with the graph kept or new in each call.

    `narrow` adds ours with bfloat16 features and weights, `compiled` stock under torch.compile.
    """
    x, labels = torch.randn(nodes, 128), torch.randint(0, 40, (nodes,))
    types = torch.randint(0, RELATIONS, (edge_index.shape[1],))
    rowptr, col, _ = coo_to_csr(edge_index[1], edge_index[0], nodes, nodes)
    matrix = torch.sparse_csr_tensor(rowptr.long(), col.long(), torch.ones(len(col)), size=(nodes, nodes))
    step = _training_step if train else _inference
    cases: dict[str, Systems] = {}
    for name, model in models(edge_index).items():
        if name not in names:
            continue
        stock = model.train(train)
        ours = accelerate_for_cpu(copy.deepcopy(model), dtype="float32")
        typed = (types,) if name == "RGCN" else ()

        def run(
            model: nn.Module, edges: Tensor = edge_index, x: Tensor = x, typed: tuple[Tensor, ...] = typed
        ) -> object:
            return step(model, labels, x, edges, *typed)

        def anew(ours: nn.Module = ours, run: Callable[..., object] = run) -> object:
            adjacencies.clear()
            return run(ours)

        systems: Systems = {"PyG edge_index": lambda m=stock, run=run: run(m)}
        if not typed:  # RGCN takes a matrix from torch-sparse only
            systems["PyG sparse CSR"] = lambda m=stock, run=run: run(m, matrix)
        if compiled:
            compiled_model = torch.compile(stock, dynamic=True)
            systems[COMPILED] = lambda m=compiled_model, run=run: run(m)
        systems |= {"ours": lambda m=ours, run=run: run(m), "ours, new graph": anew}
        if narrow and not typed:  # stock RGCN gives float32 for bfloat16, which its next layer refuses
            half = accelerate_for_cpu(copy.deepcopy(model).bfloat16())
            narrow_x = x.bfloat16()
            systems["ours, bfloat16"] = lambda m=half, x=narrow_x, run=run: run(m, x=x)
        cases[f"{name} {'training step' if train else 'inference'}"] = systems
    return cases


def _inference(model: nn.Module, labels: Tensor, *inputs: Tensor) -> None:
    with torch.no_grad():
        model(*inputs)


def _training_step(model: nn.Module, labels: Tensor, *inputs: Tensor) -> None:
    model.zero_grad()
    nn.functional.cross_entropy(model(*inputs).float(), labels).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-3)


def timings_of(systems: Systems, rounds: int) -> dict[str, Timing]:
    """Time the systems in turns, after one call of each."""
    for run in systems.values():
        run()
    return interleaved(systems, rounds=rounds, calls=1)
