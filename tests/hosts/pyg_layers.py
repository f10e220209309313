"""The layers of PyTorch Geometric that the tests accelerate, each with what its call takes besides a graph."""

from __future__ import annotations

import torch
import torch_geometric.nn as pyg
from torch import nn

NODES, EDGES, FEATURES = 50, 300, 24


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


WEIGHT = {"edge_weight": torch.rand(EDGES)}
ATTRIBUTES = {"edge_attr": torch.rand(EDGES, 5)}
TYPES = {"edge_type": torch.randint(0, 3, (EDGES,))}
AGGREGATORS, SCALERS = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]
DEGREES = torch.tensor([5, 3, 9, 8, 7, 6, 4, 3, 2, 1])


def pna(*more: str, scalers: tuple[str, ...] = (), **options: object) -> nn.Module:
    return pyg.PNAConv(FEATURES, 12, [*AGGREGATORS, *more], [*SCALERS, *scalers], DEGREES, **options)


LAYERS = {
    "gcn": (lambda: pyg.GCNConv(FEATURES, 10), {}),
    "gcn wider": (lambda: pyg.GCNConv(FEATURES, 40), {}),
    "gcn improved": (lambda: pyg.GCNConv(FEATURES, 10, improved=True), {}),
    "gcn no loops": (lambda: pyg.GCNConv(FEATURES, 10, add_self_loops=False, bias=False), {}),
    "gcn weighted": (lambda: pyg.GCNConv(FEATURES, 10), WEIGHT),
    "gcn reversed": (lambda: pyg.GCNConv(FEATURES, 10, flow="target_to_source"), {}),
    "sage mean": (lambda: pyg.SAGEConv(FEATURES, 10), {}),
    "sage sum": (lambda: pyg.SAGEConv(FEATURES, 40, aggr="sum", normalize=True), {}),
    "sage max": (lambda: pyg.SAGEConv(FEATURES, 10, aggr="max", project=True), {}),
    "sage min": (lambda: pyg.SAGEConv(FEATURES, 10, aggr="min", root_weight=False), {}),
    "sage reversed": (lambda: pyg.SAGEConv(FEATURES, 10, flow="target_to_source"), {}),
    "gin": (lambda: pyg.GINConv(mlp(FEATURES, 12), eps=0.3), {}),
    "gin trained eps": (lambda: pyg.GINConv(mlp(FEATURES, 12), train_eps=True), {}),
    "gine": (lambda: pyg.GINEConv(mlp(FEATURES, 12), edge_dim=5), ATTRIBUTES),
    "graph": (lambda: pyg.GraphConv(FEATURES, 10, aggr="mean"), {}),
    "graph weighted": (lambda: pyg.GraphConv(FEATURES, 40, aggr="max"), WEIGHT),
    "gat": (lambda: pyg.GATConv(FEATURES, 8, heads=4), {}),
    "gat mean of heads": (lambda: pyg.GATConv(FEATURES, 7, heads=3, concat=False, residual=True), {}),
    "gat edges": (lambda: pyg.GATConv(FEATURES, 8, heads=2, edge_dim=5), ATTRIBUTES),
    "gatv2": (lambda: pyg.GATv2Conv(FEATURES, 8, heads=4), {}),
    "gatv2 shared": (lambda: pyg.GATv2Conv(FEATURES, 7, heads=3, concat=False, share_weights=True), {}),
    "gat edges, no loops": (
        lambda: pyg.GATConv(FEATURES, 8, heads=2, edge_dim=5, add_self_loops=False),
        ATTRIBUTES,
    ),
    "transformer": (lambda: pyg.TransformerConv(FEATURES, 8, heads=4), {}),
    "transformer beta": (
        lambda: pyg.TransformerConv(FEATURES, 8, heads=4, concat=False, beta=True),
        {},
    ),
    "transformer edges": (lambda: pyg.TransformerConv(FEATURES, 8, heads=4, edge_dim=5), ATTRIBUTES),
    "transformer no root": (lambda: pyg.TransformerConv(FEATURES, 8, root_weight=False), {}),
    "pna": (pna, {}),
    "pna towers": (lambda: pna("var", "sum", scalers=("linear", "inverse_linear"), towers=3), {}),
    "pna edges": (
        lambda: pna(towers=3, divide_input=True, edge_dim=5, train_norm=True),
        ATTRIBUTES,
    ),
    "pna deep": (lambda: pna(towers=2, pre_layers=2, post_layers=2, edge_dim=5), ATTRIBUTES),
    "pna deep elu": (lambda: pna(pre_layers=2, act="elu"), {}),
    "sage std": (lambda: pyg.SAGEConv(FEATURES, 10, aggr="std"), {}),
    "sage list": (lambda: pyg.SAGEConv(FEATURES, 10, aggr=["mean", "max", "std"]), {}),
    "sage sum of many": (
        lambda: pyg.SAGEConv(FEATURES, 10, aggr=pyg.MultiAggregation(["var", "max"], mode="sum")),
        {},
    ),
    "gine max": (
        lambda: pyg.GINEConv(mlp(FEATURES, 12), edge_dim=5, train_eps=True, aggr="max"),
        ATTRIBUTES,
    ),
    "edge relu": (lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(2 * FEATURES, 20), nn.ReLU())), {}),
    "edge sum": (lambda: pyg.EdgeConv(mlp(2 * FEATURES, 20), aggr="sum"), {}),
    "edge norm": (
        lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(2 * FEATURES, 8), nn.BatchNorm1d(8), nn.ELU())),
        {},
    ),
    "gatv2 edges": (lambda: pyg.GATv2Conv(FEATURES, 8, heads=2, edge_dim=5, residual=True), ATTRIBUTES),
    "edge list": (lambda: pyg.EdgeConv(nn.Linear(2 * FEATURES, 6), aggr=["mean", "max"]), {}),
    "tag": (lambda: pyg.TAGConv(FEATURES, 10), {}),
    "cheb": (lambda: pyg.ChebConv(FEATURES, 10, 3), {}),
    "appnp": (lambda: pyg.APPNP(3, 0.1), {}),
    "arma": (lambda: pyg.ARMAConv(FEATURES, 10), {}),
    "edge": (lambda: pyg.EdgeConv(mlp(2 * FEATURES, 10)), {}),
    "rgcn": (lambda: pyg.RGCNConv(FEATURES, 10, 3), TYPES),
    "rgcn bases": (lambda: pyg.RGCNConv(FEATURES, 10, 3, num_bases=2, aggr="sum"), TYPES),
    "rgcn blocks": (
        lambda: pyg.RGCNConv(FEATURES, 10, 3, num_blocks=2, aggr="max", root_weight=False, bias=False),
        TYPES,
    ),
    "fast rgcn": (lambda: pyg.FastRGCNConv(FEATURES, 10, 3), TYPES),
    "gated": (lambda: pyg.GatedGraphConv(FEATURES, 2), {}),
}


def served(conv: nn.Module) -> int:
    """How many calls of the layer were ours."""
    own = vars(conv)
    return (own["propagate"] if "propagate" in own else own["forward"].propagate).served
