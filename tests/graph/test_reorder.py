"""Models that compute with their nodes in another order: nobody can tell from the outside."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.graph.reorder import node_order

NODES, FEATURES = 50, 12
KINDS = ("degree", "rcm")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(NODES, FEATURES)


@pytest.fixture
def edge_index() -> Tensor:
    return torch.randint(0, NODES - 3, (2, 200))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_in_the_callers_order(kind: str, x: Tensor, edge_index: Tensor) -> None:
    model, weight = pyg.GCN(FEATURES, 16, 2, out_channels=5), torch.rand(200)
    results = []
    for candidate in (model, accelerate_for_cpu(copy.deepcopy(model), reorder=kind)):
        leaf = x.clone().requires_grad_()
        output = candidate(leaf, edge_index, edge_weight=weight)
        results.append([output.detach(), *torch.autograd.grad(output[:7].square().sum(), leaf)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert vars(candidate)["forward"].served == 1
    assert kind in str(explain(candidate))
    restore(candidate)
    assert "forward" not in vars(candidate)


@pytest.mark.parametrize("kind", KINDS)
def test_edits_of_the_edges_are_seen(kind: str, x: Tensor, edge_index: Tensor) -> None:
    model = accelerate_for_cpu(
        pyg.GraphSAGE(FEATURES, 16, 2, out_channels=5).eval(), dtype="float32", reorder=kind
    )
    stock = restore(copy.deepcopy(model))
    for edit in (
        lambda: None,
        lambda: edge_index[1].fill_(4),
        lambda: edge_index.copy_(edge_index.flip(1) // 2),
    ):
        edit()
        torch.testing.assert_close(model(x, edge_index), stock(x, edge_index), rtol=1e-4, atol=1e-5)
    assert vars(model)["forward"].served == 3
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        model(x[:5], edge_index)


class Pooled(nn.Module):
    """What it returns is not one row per node, and it takes a tensor that is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(FEATURES, 8)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        return pyg.global_mean_pool(self.conv(x, edge_index), batch)


def test_other_calls_go_to_the_model_as_they_are(x: Tensor, edge_index: Tensor) -> None:
    model = accelerate_for_cpu(Pooled().eval(), dtype="float32", reorder="degree")
    stock = restore(copy.deepcopy(model))
    for others in ((), (torch.arange(NODES) % 3,)):
        expected = stock(x, edge_index, *others)
        torch.testing.assert_close(model(x, edge_index, *others), expected, rtol=1e-4, atol=1e-5)
    assert vars(model)["forward"].served == 0


def test_the_band_of_a_path() -> None:
    numbers = torch.randperm(NODES)
    edge_index = torch.stack([numbers[:-1], numbers[1:]])
    place = torch.empty_like(numbers)
    place[node_order(edge_index, NODES, "rcm")] = torch.arange(NODES)
    assert (place[edge_index[0]] - place[edge_index[1]]).abs().max() == 1
    star = torch.stack([torch.arange(1, NODES), torch.full((NODES - 1,), 0)])
    assert node_order(star, NODES, "degree")[0] == 0
