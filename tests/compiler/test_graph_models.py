"""Models of PyTorch Geometric, as they are and accelerated: one graph for all numbers of nodes and edges, and eager's answers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.compiler import torch_private
from hf_cpu_accel.compiler.backend import hf_cpu_accel
from tests.compiler.conftest import only_graph

FEATURES, RELATIONS = 16, 3
DEGREES = torch.tensor([5, 3, 9, 8, 7, 6, 4, 3, 2, 1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, FEATURES))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: pyg.GCNConv(FEATURES, FEATURES),
    "sage": lambda: pyg.SAGEConv(FEATURES, FEATURES),
    "gin": lambda: pyg.GINConv(mlp()),
    "gat": lambda: pyg.GATConv(FEATURES, 8, heads=2),
    "gatv2": lambda: pyg.GATv2Conv(FEATURES, 8, heads=2),
    "pna": lambda: pyg.PNAConv(
        FEATURES, FEATURES, ["mean", "min", "max", "std"], ["identity", "amplification"], DEGREES
    ),
    "rgcn": lambda: pyg.RGCNConv(FEATURES, FEATURES, RELATIONS),
    "transformer": lambda: pyg.TransformerConv(FEATURES, 8, heads=2),
}
# How many layers' sums over edges are one op, and how often the edges are sorted: GCN and GAT add self-loops to them in each
# layer.
MESSAGES = {
    "gcn": (2, 2),
    "sage": (2, 1),
    "gin": (2, 1),
    "gat": (2, 2),
    "gatv2": (2, 2),
    "pna": (0, 0),
    "transformer": (2, 1),
}
SAMPLES = ((30, 100), (50, 300), (77, 401))


class Net(nn.Module):
    """Two layers of a kind with a relu between them."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.first, self.second = LAYERS[layer](), LAYERS[layer]()

    def forward(self, x: Tensor, edge_index: Tensor, *edge_type: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, *edge_type).relu(), edge_index, *edge_type)


def sample(layer: str, nodes: int, edges: int) -> list[Tensor]:
    given = [torch.randn(nodes, FEATURES), torch.randint(0, nodes, (2, edges))]
    return [*given, torch.randint(0, RELATIONS, (edges,))] if layer == "rgcn" else given


@pytest.mark.usefixtures("no_codegen")
@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer != "rgcn"])
@pytest.mark.parametrize("accelerated", [False, True], ids=["stock", "accelerated"])
def test_one_graph_gives_the_same(layer: str, accelerated: bool, compiled: Callable[..., Any]) -> None:
    stock = Net(layer).eval()
    model = accelerate_for_cpu(copy.deepcopy(stock), dtype="float32") if accelerated else stock
    fast = compiled(model)
    for nodes, edges in SAMPLES:
        inputs = sample(layer, nodes, edges)
        with torch.no_grad():
            torch.testing.assert_close(fast(*inputs), stock(*inputs), rtol=1e-4, atol=1e-4)
    graph = only_graph()
    assert graph.left == "no C++ compiler"
    if not accelerated:
        ops = [graph.ours.get(f"hf_cpu_accel.{name}.default", 0) for name in ("spmm_reduce", "coo_to_csr")]
        assert (graph.rewrites["messages"], tuple(ops)) == (MESSAGES[layer][0], MESSAGES[layer])


@pytest.mark.usefixtures("no_codegen")
@pytest.mark.parametrize("accelerated", [False, True], ids=["stock", "accelerated"])
def test_relations_break_the_graph(accelerated: bool) -> None:
    """How many edges a relation has is data: the stock layer asks for it, and ours runs between two graphs."""
    stock = Net("rgcn").eval()
    model = accelerate_for_cpu(copy.deepcopy(stock), dtype="float32") if accelerated else stock
    fast = torch.compile(model, backend=hf_cpu_accel, dynamic=True)
    for nodes, edges in SAMPLES:
        inputs = sample("rgcn", nodes, edges)
        with torch.no_grad():
            torch.testing.assert_close(fast(*inputs), stock(*inputs), rtol=1e-4, atol=1e-4)
    assert torch_private.counters("graph_break")
