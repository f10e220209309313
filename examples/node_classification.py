"""Trains a graph neural network on a generated graph, before and after, and computes the embeddings of all nodes.

python examples/node_classification.py                    # 50,000 nodes, 500,000 edges, GraphSAGE
python examples/node_classification.py --model GCN --nodes 10000 --edges 80000

The labels are communities: most edges stay inside of one, so that neighbors say what the noisy features of a node do not.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.graph import inference

CLASSES, FEATURES = 8, 64


def communities(nodes: int, edges: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features [nodes, FEATURES], edge_index [2, edges], and labels [nodes]."""
    labels = torch.randint(0, CLASSES, (nodes,))
    by_label = labels.argsort()
    begin = torch.bincount(labels, minlength=CLASSES).cumsum(0).roll(1)
    begin[0] = 0
    sizes = torch.bincount(labels, minlength=CLASSES)
    target = torch.randint(0, nodes, (edges,))
    inside = (torch.rand(edges) * sizes[labels[target]]).long() + begin[labels[target]]
    source = torch.where(torch.rand(edges) < 0.7, by_label[inside], torch.randint(0, nodes, (edges,)))
    centers = torch.randn(CLASSES, FEATURES)
    return 0.3 * centers[labels] + torch.randn(nodes, FEATURES), torch.stack([source, target]), labels


def train(
    model: nn.Module, x: Tensor, edge_index: Tensor, labels: Tensor, epochs: int
) -> tuple[float, float]:
    """The last loss, and seconds per epoch after the first."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start = 0.0
    for epoch in range(epochs + 1):
        if epoch == 1:
            start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, edge_index), labels)
        loss.backward()
        optimizer.step()
    return loss.item(), (time.perf_counter() - start) / epochs


def main() -> None:
    parser = argparse.ArgumentParser(description="Node classification, stock and accelerated.")
    parser.add_argument("--model", choices=("GCN", "GraphSAGE", "GIN", "GAT"), default="GraphSAGE")
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=500_000)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    x, edge_index, labels = communities(options.nodes, options.edges)
    stock = getattr(pyg, options.model)(FEATURES, 64, num_layers=2, out_channels=CLASSES)
    ours = accelerate_for_cpu(copy.deepcopy(stock))
    for name, model in (("stock", stock), ("accelerated", ours)):
        loss, seconds = train(model, x, edge_index, labels, options.epochs)
        print(f"{name:12} {1e3 * seconds:8.1f} ms per epoch, loss {loss:.4f}")
    embeddings = inference(ours.eval(), x, edge_index, progress_bar=True)
    print(f"accuracy {(embeddings.argmax(1) == labels).float().mean():.3f}, chance {1 / CLASSES:.3f}")


if __name__ == "__main__":
    main()
