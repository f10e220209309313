"""Linear maps of layers: bfloat16 on our kernel, weights that are trained in between, linears that somebody watches."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.graph import propagate
from hf_cpu_accel.graph.dense import dense

NODES, FEATURES = 60, 24
LAYERS = {
    "gcn": lambda: pyg.GCNConv(FEATURES, 10),
    "gcn wider": lambda: pyg.GCNConv(FEATURES, 40),
    "sage": lambda: pyg.SAGEConv(FEATURES, 10),
    "sage wider": lambda: pyg.SAGEConv(FEATURES, 40),
    "sage max": lambda: pyg.SAGEConv(FEATURES, 40, aggr="max"),
    "graph": lambda: pyg.GraphConv(FEATURES, 40),
}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(NODES, FEATURES)


@pytest.fixture
def edge_index() -> Tensor:
    return torch.randint(0, NODES, (2, 300))


@pytest.fixture
def small_graphs_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propagate, "FEWEST_VALUES", 0)


@pytest.mark.usefixtures("small_graphs_are_served")
@pytest.mark.parametrize("name", LAYERS)
def test_weights_in_bfloat16_that_are_written_to(name: str, x: Tensor, edge_index: Tensor) -> None:
    layer = LAYERS[name]().bfloat16().eval()
    ours = accelerate_for_cpu(copy.deepcopy(layer), dtype="bfloat16")
    for _ in range(2):
        with torch.no_grad():
            expected = copy.deepcopy(layer).float()(x.bfloat16().float(), edge_index)
            result = ours(x.bfloat16(), edge_index)
        assert result.dtype is torch.bfloat16
        torch.testing.assert_close(result.float(), expected, rtol=3e-2, atol=3e-2)
        with torch.no_grad():
            for mine, theirs in zip(ours.parameters(), layer.parameters(), strict=True):
                theirs.mul_(-1.5)
                mine.copy_(theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_addend", [True, False])
def test_dense(dtype: torch.dtype, with_bias: bool, with_addend: bool) -> None:
    """With and without a gradient, against float64."""
    x, weight = torch.randn(33, 20, dtype=dtype), torch.randn(7, 20, dtype=dtype)
    bias = torch.randn(7, dtype=dtype) if with_bias else None
    addend = torch.randn(33, 7, dtype=dtype) if with_addend else None
    expected = x.double() @ weight.double().T
    expected += 0 if bias is None else bias.double()
    expected += 0 if addend is None else addend.double()
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            given = weight.clone().requires_grad_(learns)
            result = dense(x, given, bias, None if addend is None else addend.clone())
        assert result.requires_grad == learns
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("small_graphs_are_served")
@pytest.mark.parametrize("name", LAYERS)
def test_linears_that_somebody_watches_or_wraps_are_called(name: str, x: Tensor, edge_index: Tensor) -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.bias, self.weight = inner, inner.bias, inner.weight
            self.in_channels, self.out_channels = inner.in_channels, inner.out_channels

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    stock = LAYERS[name]()
    ours = accelerate_for_cpu(copy.deepcopy(stock))
    calls = []
    for layer in (stock, ours):
        child = next(key for key, part in layer.named_children() if isinstance(part, pyg.Linear))
        getattr(layer, child).register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(x, edge_index), stock(x, edge_index))
        assert len(calls) == 2
        for layer in (stock, ours):
            setattr(layer, child, Doubled(getattr(layer, child)))
        torch.testing.assert_close(ours(x, edge_index), stock(x, edge_index))


@pytest.mark.parametrize("name", ["sage", "graph", "gat", "gin"])
def test_small_steps_of_training_are_left_to_the_layer(name: str, x: Tensor, edge_index: Tensor) -> None:
    layers = {
        **LAYERS,
        "gat": lambda: pyg.GATConv(FEATURES, 8, heads=2),
        "gin": lambda: pyg.GINConv(nn.Linear(FEATURES, 8)),
    }
    ours = accelerate_for_cpu(layers[name]())
    propagation = vars(ours)["forward"].propagate
    ours(x, edge_index)
    assert propagation.served == 0
    with torch.no_grad():
        ours(x, edge_index)
    assert propagation.served == 1
