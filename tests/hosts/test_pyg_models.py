"""Whole models of PyTorch Geometric: trained, explained, copied, and of many types of nodes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from tests.hosts.pyg_layers import AGGREGATORS, ATTRIBUTES, DEGREES, FEATURES, NODES, SCALERS, mlp, served

pytestmark = pytest.mark.usefixtures("small_graphs_are_served")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = pyg.SAGEConv(FEATURES, 32)
        self.second = pyg.GATConv(32, 8, heads=2, dropout=0.5)
        self.third = pyg.GCNConv(16, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.third(self.second(self.first(x, edge_index).relu(), edge_index).relu(), edge_index)


def losses(model: nn.Module, x: Tensor, edge_index: Tensor) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    labels, values = torch.arange(NODES) % 5, []
    model.second.dropout = 0.0  # its random numbers would be drawn in another order
    for _ in range(12):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, edge_index), labels)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def test_training_has_the_same_losses(x: Tensor, edge_index: Tensor) -> None:
    model = Net()
    expected = losses(copy.deepcopy(model), x, edge_index)
    accelerate_for_cpu(model)
    assert model.training
    assert losses(model, x, edge_index) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]
    model.eval()
    with torch.no_grad():
        ours = model(x, edge_index)
        torch.testing.assert_close(ours, restore(model)(x, edge_index), rtol=1e-4, atol=1e-4)


def test_the_plan_says_what_is_left_and_why() -> None:
    model = nn.ModuleDict(
        {
            "sage": pyg.SAGEConv(8, 8),
            "lstm": pyg.SAGEConv(8, 8, aggr="lstm", aggr_kwargs={"in_channels": 8, "out_channels": 8}),
            "skipped": pyg.GCNConv(8, 8),
        }
    )
    plan = explain(accelerate_for_cpu(model, skip_modules=("skipped",)))
    items = {item.name: item for item in plan.items}
    assert items["sage"].reason is None
    assert "sum, mean, min, max" in items["lstm"].reason
    assert items["skipped"].reason == "skip_modules"
    assert "sage" in str(plan)


class Hetero(nn.Module):
    """Two types of nodes and three of edges, in the two ways that PyTorch Geometric has for them."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [("a", "to", "b"), ("b", "back", "a"), ("a", "same", "a")]
        self.first = pyg.HeteroConv({kind: pyg.SAGEConv((FEATURES, FEATURES), 16) for kind in kinds})
        self.second = pyg.HGTConv(16, 16, (["a", "b"], kinds), heads=2)

    def forward(self, x: dict[str, Tensor], edges: dict[tuple[str, str, str], Tensor]) -> Tensor:
        hidden = {name: part.relu() for name, part in self.first(x, edges).items()}
        return torch.cat(list(self.second(hidden, edges).values()))


def test_heterogeneous_graphs(edge_index: Tensor) -> None:
    model = Hetero()
    x = {"a": torch.randn(NODES, FEATURES), "b": torch.randn(NODES, FEATURES)}
    kinds = model.first.convs.keys()
    edges = {tuple(kind): edge_index[:, part::3] for part, kind in enumerate(kinds)}
    stock = copy.deepcopy(model)
    accelerate_for_cpu(model)
    results = []
    for net in (model, stock):
        output = net(x, edges)
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        results.append(
            [
                output,
                *torch.autograd.grad((output * weights).sum(), list(net.parameters()), allow_unused=True),
            ]
        )
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert served(model.second) == 1
    assert all(served(conv) == 1 for conv in model.first.convs.values())


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN"])
def test_whole_models(name: str, x: Tensor, edge_index: Tensor) -> None:
    options = {"aggregators": AGGREGATORS, "scalers": SCALERS, "deg": DEGREES} if name == "PNA" else {}
    model = getattr(pyg, name)(
        FEATURES, 16, num_layers=2, out_channels=5, norm="batch", jk="cat", **options
    ).eval()
    with torch.no_grad():
        expected = model(x, edge_index)
        accelerate_for_cpu(model, dtype="float32")
        torch.testing.assert_close(model(x, edge_index), expected, rtol=1e-4, atol=1e-4)
        assert all(served(conv) == 1 for conv in model.convs)
        assert torch.equal(restore(model)(x, edge_index), expected)


def test_transformers_of_graphs(x: Tensor, edge_index: Tensor) -> None:
    model = pyg.GPSConv(FEATURES, pyg.GINEConv(mlp(FEATURES, FEATURES), edge_dim=5), heads=2).eval()
    expected = model(x, edge_index, **ATTRIBUTES)
    accelerate_for_cpu(model, dtype="float32")
    torch.testing.assert_close(model(x, edge_index, **ATTRIBUTES), expected, rtol=1e-4, atol=1e-4)
    assert served(model.conv) == 1


def test_copies_and_pickles(x: Tensor, edge_index: Tensor) -> None:
    model = accelerate_for_cpu(Net().eval(), dtype="float32")
    expected = model(x, edge_index)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert vars(other.first)["propagate"].conv is other.first
        torch.testing.assert_close(other(x, edge_index), expected)
        restore(other)
        torch.testing.assert_close(other(x, edge_index), expected, rtol=1e-4, atol=1e-4)
    assert "propagate" in vars(model.first)
