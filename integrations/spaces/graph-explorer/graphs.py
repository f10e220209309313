"""Two graphs, a graph neural network trained on each within seconds, and its classes of a node."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GCN
from torch_geometric.utils import to_undirected

from hf_cpu_accel.serve.comparison import Comparison, Pair, compare_calls

COMMUNITIES = "20,000 nodes in eight communities"
KARATE = "Zachary's karate club, 34 people"
NAMES = (COMMUNITIES, KARATE)
CLASSES, FEATURES, HIDDEN = 8, 32, 64
MOST_NEIGHBORS = 30  # in the picture


@dataclass(frozen=True)
class Explorer:
    """A graph and a model that classifies its nodes, eager and accelerated.

    Attributes:
        data: x float32 [nodes, features], edge_index int64 [2, edges], y int64 [nodes], train_mask bool [nodes].
        pair: `GCN` models of (x, edge_index) -> float32 [nodes, classes].
        accuracy: accuracy of the eager model on the nodes that are not in train_mask.
    """

    data: Data
    pair: Pair[nn.Module]
    accuracy: float


@dataclass(frozen=True)
class Node:
    """A node and its classes.

    Attributes:
        number: number of the node.
        label: its true class.
        eager: probabilities of the classes from the eager model, float32 [classes].
        accelerated: probabilities of the classes from the accelerated model, float32 [classes].
        neighbors: numbers of at most `MOST_NEIGHBORS` neighbors.
        degree: number of all neighbors.
    """

    number: int
    label: int
    eager: Tensor
    accelerated: Tensor
    neighbors: list[int]
    degree: int


def communities(nodes: int = 20_000, degree: int = 20) -> Data:
    """Return a stochastic block model: 40 % of the edges are drawn within a community, and the features are noisy."""
    y = torch.arange(CLASSES).repeat_interleave(nodes // CLASSES)
    source = torch.arange(len(y)).repeat_interleave(degree // 2)  # each edge is added in both directions
    inside = y[source] * (nodes // CLASSES) + torch.randint(nodes // CLASSES, source.shape)
    target = torch.where(torch.rand(len(source)) < 0.4, inside, torch.randint(len(y), source.shape))
    edge_index = to_undirected(torch.stack([source, target]))
    x = 0.3 * torch.randn(CLASSES, FEATURES)[y] + torch.randn(len(y), FEATURES)
    return Data(x=x, edge_index=edge_index, y=y, train_mask=torch.rand(len(y)) < 0.1)


def train(data: Data, classes: int, epochs: int) -> nn.Module:
    """Train a GCN of two layers on the nodes in train_mask, and return it in eval mode."""
    model = GCN(data.num_features, HIDDEN, num_layers=2, out_channels=classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-3)
    for _ in range(epochs):
        optimizer.zero_grad()
        scores = model(data.x, data.edge_index)
        F.cross_entropy(scores[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
    return model.eval()


def explore(name: str, *, nodes: int = 20_000, seed: int = 0) -> Explorer:
    """Create a graph, train a model on it, and accelerate a copy of the model.

    Raises:
        ValueError: a name that is not in `NAMES`.
    """
    if name not in NAMES:
        raise ValueError(f"Graph {name!r} does not exist; choose {' or '.join(NAMES)}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        data = communities(nodes) if name == COMMUNITIES else KarateClub()[0]
        model = train(data, int(data.y.max()) + 1, epochs=12 if name == COMMUNITIES else 60)
        pair = Pair(model, dtype="float32")
    correct = classify(model, data).argmax(1) == data.y
    return Explorer(data, pair, correct[~data.train_mask].float().mean().item())


def node_of(explorer: Explorer, number: int) -> Node:
    """Classify all nodes with both models, and return one node.

    Raises:
        ValueError: no node has this number.
    """
    data = explorer.data
    if not isinstance(number, int) or not 0 <= number < data.num_nodes:
        raise ValueError(f"Node {number} does not exist; enter a number from 0 to {data.num_nodes - 1}.")
    eager, accelerated = (
        classify(model, data)[number] for model in (explorer.pair.eager, explorer.pair.accelerated)
    )
    neighbors = data.edge_index[0][data.edge_index[1] == number].unique().tolist()
    return Node(number, int(data.y[number]), eager, accelerated, neighbors[:MOST_NEIGHBORS], len(neighbors))


@torch.inference_mode()
def classify(model: nn.Module, data: Data) -> Tensor:
    """Return the probabilities of the classes, float32 [nodes, classes]."""
    return model(data.x, data.edge_index).softmax(dim=1)


def measure(explorer: Explorer) -> Comparison:
    """Measure the time of a forward pass over the graph."""
    data = explorer.data
    return compare_calls(
        lambda: classify(explorer.pair.eager, data),
        lambda: classify(explorer.pair.accelerated, data),
        amount=data.num_nodes,
        unit="nodes",
        rounds=3,
        seconds=0.05,
    )
