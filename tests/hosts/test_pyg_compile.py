"""Accelerated graph models under torch.compile: one graph, whatever the numbers of nodes and edges."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch._dynamo.utils import counters

from hf_cpu_accel import accelerate_for_cpu

FEATURES = 16
DEGREES = torch.tensor([5, 3, 9, 8, 7, 6, 4, 3, 2, 1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, FEATURES))


LAYERS = {
    "gcn": lambda: pyg.GCNConv(FEATURES, FEATURES),
    "sage": lambda: pyg.SAGEConv(FEATURES, FEATURES),
    "gin": lambda: pyg.GINConv(mlp()),
    "gat": lambda: pyg.GATConv(FEATURES, 8, heads=2),
    "gatv2": lambda: pyg.GATv2Conv(FEATURES, 8, heads=2),
    "pna": lambda: pyg.PNAConv(
        FEATURES, FEATURES, ["mean", "min", "max", "std"], ["identity", "amplification"], DEGREES
    ),
    "transformer": lambda: pyg.TransformerConv(FEATURES, 8, heads=2),
}


class Net(nn.Module):
    def __init__(self, layer: str) -> None:
        super().__init__()
        self.first, self.second = LAYERS[layer](), LAYERS[layer]()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def compiled(layer: str, *, train: bool, backend: str) -> tuple[nn.Module, nn.Module]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    stock = Net(layer).train(train)
    ours = accelerate_for_cpu(copy.deepcopy(stock), dtype="float32")
    return torch.compile(ours, fullgraph=True, dynamic=True, backend=backend), stock


@pytest.mark.parametrize("layer", LAYERS)
def test_one_graph_for_training(layer: str) -> None:
    """Those for inference are in tests/compiler/test_graph_models.py."""
    model, stock = compiled(layer, train=True, backend="aot_eager")
    for nodes, edges in ((30, 100), (50, 300), (77, 401)):
        x, edge_index = torch.randn(nodes, FEATURES), torch.randint(0, nodes, (2, edges))
        output, expected = model(x, edge_index), stock(x, edge_index)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        grads = [
            torch.autograd.grad(y.square().sum(), list(net.parameters()))
            for y, net in ((output, model), (expected, stock))
        ]
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1


def test_inductor() -> None:
    """The same through code generation, for the layer with the most ops in it."""
    model, stock = compiled("pna", train=False, backend="inductor")
    with torch.no_grad():
        for nodes, edges in ((30, 100), (77, 401)):
            x, edge_index = torch.randn(nodes, FEATURES), torch.randint(0, nodes, (2, edges))
            torch.testing.assert_close(model(x, edge_index), stock(x, edge_index), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
