"""Aggregations that a model calls itself: as stock, with gradients, and stock where they are not ours."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.graph import propagate

NODES, FEATURES, GRAPHS = 60, 12, 7
POOLS = {
    "sum": pyg.SumAggregation,
    "mean": pyg.MeanAggregation,
    "min": pyg.MinAggregation,
    "max": pyg.MaxAggregation,
    "var": pyg.VarAggregation,
    "std": pyg.StdAggregation,
    "list": lambda: pyg.MultiAggregation(["mean", "max", "std"]),
}


class Net(nn.Module):
    """A convolution, and a row per graph."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.conv, self.pool = pyg.GraphConv(FEATURES, FEATURES), pool

    def forward(self, x: Tensor, edge_index: Tensor, *args: object, **kwargs: object) -> Tensor:
        return self.pool(self.conv(x, edge_index), *args, **kwargs)


@pytest.fixture(autouse=True)
def small_graphs_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propagate, "FEWEST_VALUES", 0)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(NODES, FEATURES)


@pytest.fixture
def edge_index() -> Tensor:
    return torch.randint(0, NODES, (2, 200))


def served(model: Net) -> int:
    return vars(model.pool)["forward"].served


@pytest.mark.parametrize("ordered", [True, False], ids=("ordered", "mixed"))
@pytest.mark.parametrize("name", POOLS)
def test_outputs_and_gradients(name: str, ordered: bool, x: Tensor, edge_index: Tensor) -> None:
    """Graph 3 has no nodes, and the last one none either."""
    batch = torch.randint(0, GRAPHS - 1, (NODES,))
    batch[batch == 3] = 0
    batch = batch.sort().values if ordered else batch
    stock = Net(POOLS[name]())
    ours = accelerate_for_cpu(copy.deepcopy(stock))
    results = []
    for model in (stock, ours):
        leaf = x.clone().requires_grad_()
        output = model(leaf, edge_index, batch, dim_size=GRAPHS)
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), leaf)])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert served(ours) == 1
    assert "pooling" in str(explain(ours))
    restore(ours)
    assert "forward" not in vars(ours.pool)


def test_what_is_not_rows_by_group_goes_to_the_module(x: Tensor, edge_index: Tensor) -> None:
    """Bounds instead of numbers, no groups at all, another dimension, and groups that are not there."""
    stock = Net(pyg.MeanAggregation())
    ours = accelerate_for_cpu(copy.deepcopy(stock))
    bounds = torch.tensor([0, 10, 10, NODES])
    torch.testing.assert_close(ours(x, edge_index, ptr=bounds), stock(x, edge_index, ptr=bounds))
    torch.testing.assert_close(
        ours.pool(x.T, torch.arange(NODES) % 5, dim=-1), stock.pool(x.T, torch.arange(NODES) % 5, dim=-1)
    )
    assert served(ours) == 0
    torch.testing.assert_close(ours(x, edge_index), stock(x, edge_index))  # all of them are one group
    assert served(ours) == 1
    batch = torch.arange(NODES) % 5
    for size, value in ((4, 0), (5, -1)):
        batch[0] = value
        errors = []
        for model in (stock, ours):
            with pytest.raises((ValueError, RuntimeError, IndexError)) as error:
                model(x, edge_index, batch, dim_size=size)
            errors.append((type(error.value), str(error.value)))
        assert errors[0] == errors[1]


def test_small_pools_and_others_are_left(
    x: Tensor, edge_index: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(propagate, "FEWEST_VALUES", NODES * FEATURES + 1)
    batch = torch.arange(NODES) // 10
    ours = accelerate_for_cpu(Net(pyg.SumAggregation()))
    ours(x, edge_index, batch)
    assert served(ours) == 0
    median = accelerate_for_cpu(Net(pyg.MedianAggregation()))
    assert "forward" not in vars(median.pool)
    assert "its aggregation is not supported" in str(explain(median))
