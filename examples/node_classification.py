"""Train a graph neural network on a generated graph, eager and accelerated; compare loss, accuracy and times.

python examples/node_classification.py                      # GraphSAGE, 50,000 nodes, 500,000 edges
python examples/node_classification.py --model GCN --epochs 20
python examples/node_classification.py --random-config      # 5,000 nodes, 50,000 edges: seconds

Labels are communities. Most edges stay inside a community, so neighbors show a label that noisy features hide.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data

from hf_cpu_accel import accelerate_for_cpu

CLASSES, FEATURES = 8, 64


def communities(nodes: int, edges: int) -> Data:
    """Return a graph: x [nodes, FEATURES], edge_index [2, edges], y [nodes], and train_mask for half of the nodes."""
    y = torch.arange(nodes) * CLASSES // nodes
    target = torch.randint(nodes, (edges,))
    neighbor = (y[target] * nodes + torch.randint(nodes, (edges,))) // CLASSES  # in the same community
    source = torch.where(torch.rand(edges) < 0.7, neighbor, torch.randint(nodes, (edges,)))
    x = 0.3 * torch.randn(CLASSES, FEATURES)[y] + torch.randn(nodes, FEATURES)
    return Data(x=x, edge_index=torch.stack([source, target]), y=y, train_mask=torch.rand(nodes) < 0.5)


def train(model: nn.Module, data: Data, epochs: int) -> tuple[float, float]:
    """Return the last loss, and the seconds per epoch without the first epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start = 0.0
    for epoch in range(epochs + 1):
        if epoch == 1:
            start = time.perf_counter()
        optimizer.zero_grad()
        scores = model(data.x, data.edge_index)
        loss = F.cross_entropy(scores[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
    return loss.item(), (time.perf_counter() - start) / epochs


@torch.inference_mode()
def accuracy(model: nn.Module, data: Data) -> float:
    """Return the share of nodes outside of train_mask that `model` classifies correctly."""
    correct = model.eval()(data.x, data.edge_index).argmax(dim=1) == data.y
    return correct[~data.train_mask].float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Node classification, eager and accelerated.")
    parser.add_argument("--model", choices=("GCN", "GraphSAGE", "GIN", "GAT"), default="GraphSAGE")
    parser.add_argument(
        "--random-config", action="store_true", help="a small graph: 5,000 nodes, 50,000 edges"
    )
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=500_000)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    if options.random_config:
        options.nodes, options.edges = 5_000, 50_000

    torch.manual_seed(0)
    data = communities(options.nodes, options.edges)
    eager = getattr(pyg, options.model)(FEATURES, 64, num_layers=2, out_channels=CLASSES)
    accelerated = accelerate_for_cpu(copy.deepcopy(eager))  # in training mode: it stays trainable

    print(f"{'':12} {'s/epoch':>8} {'speedup':>8} {'loss':>8} {'accuracy':>9}")
    eager_loss, eager_seconds = train(eager, data, options.epochs)
    print(f"{'eager':12} {eager_seconds:8.4f} {'':8} {eager_loss:8.4f} {accuracy(eager, data):9.1%}")
    loss, seconds = train(accelerated, data, options.epochs)
    print(
        f"{'accelerated':12} {seconds:8.4f} {eager_seconds / seconds:7.2f}x {loss:8.4f}"
        f" {accuracy(accelerated, data):9.1%}"
    )


if __name__ == "__main__":
    main()
