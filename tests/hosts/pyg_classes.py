"""Every message-passing class of PyTorch Geometric that needs no compiled extension: how it is built and called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

SOURCES, TARGETS, EDGES, FEATURES = 40, 40, 240, 8
"""Nodes on each side of a graph, its edges, and the features of a node."""

OTHER_TARGETS = 33
"""Targets of a graph whose sides differ."""

EDGE_FEATURES, RELATIONS = 5, 3


class FakeSparseTensor:
    """The part of a torch_sparse.SparseTensor that is read."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix.to_sparse_csr()

    def csr(self) -> tuple[Tensor, Tensor, None]:
        return self.matrix.crow_indices(), self.matrix.col_indices(), None

    def sparse_sizes(self) -> tuple[int, int]:
        return tuple(self.matrix.shape)


def _mlp(inputs: int, outputs: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 7), nn.Tanh(), nn.Linear(7, outputs))


def _rgat(**options: Any) -> nn.Module:
    conv = pyg.RGATConv(FEATURES, 6, RELATIONS, heads=2, **options)
    nn.init.constant_(conv.l2, 1 / 6)  # the layer leaves it uninitialized
    return conv


F, PAIR = FEATURES, (FEATURES, FEATURES)
DEGREES = torch.tensor([5, 3, 9, 8, 7, 6, 4, 3, 2, 1])

CLASSES: dict[str, Callable[..., nn.Module]] = {
    "AGNNConv": lambda **o: pyg.AGNNConv(**o),
    "APPNP": lambda **o: pyg.APPNP(2, 0.1, **o),
    "ARMAConv": lambda **o: pyg.ARMAConv(F, 6, **o),
    "CGConv": lambda **o: pyg.CGConv(PAIR, **o),
    "ChebConv": lambda **o: pyg.ChebConv(F, 6, 3, **o),
    "ClusterGCNConv": lambda **o: pyg.ClusterGCNConv(F, 6, **o),
    "EdgeConv": lambda **o: pyg.EdgeConv(_mlp(2 * F), **o),
    "EdgeConv linear": lambda **o: pyg.EdgeConv(nn.Linear(2 * F, 6), aggr="sum", **o),
    "EGConv": lambda **o: pyg.EGConv(F, 8, num_heads=2, num_bases=2, **o),
    "FAConv": lambda **o: pyg.FAConv(F, dropout=0.0, **o),
    "FeaStConv": lambda **o: pyg.FeaStConv(F, 6, heads=2, **o),
    "FiLMConv": lambda **o: pyg.FiLMConv(PAIR, 6, **o),
    "GATConv": lambda **o: pyg.GATConv(F, 3, heads=2, **o),
    "GATConv pair": lambda **o: pyg.GATConv(PAIR, 3, heads=2, add_self_loops=False, **o),
    "GATConv no loops": lambda **o: pyg.GATConv(
        F, 3, heads=2, add_self_loops=False, concat=False, residual=True, **o
    ),
    "GATConv edges": lambda **o: pyg.GATConv(F, 3, heads=2, edge_dim=EDGE_FEATURES, **o),
    "GATv2Conv": lambda **o: pyg.GATv2Conv(F, 3, heads=2, **o),
    "GATv2Conv pair": lambda **o: pyg.GATv2Conv(PAIR, 3, heads=2, add_self_loops=False, **o),
    "GATv2Conv edges": lambda **o: pyg.GATv2Conv(
        F, 3, heads=2, edge_dim=EDGE_FEATURES, add_self_loops=False, **o
    ),
    "GatedGraphConv": lambda **o: pyg.GatedGraphConv(F, 2, **o),
    "GCN2Conv": lambda **o: pyg.GCN2Conv(F, alpha=0.1, **o),
    "GCNConv": lambda **o: pyg.GCNConv(F, 6, **o),
    "GCNConv wider": lambda **o: pyg.GCNConv(F, 12, normalize=False, **o),
    "GENConv": lambda **o: pyg.GENConv(PAIR, 6, **o),
    "GeneralConv": lambda **o: pyg.GeneralConv(PAIR, 6, **o),
    "GeneralConv attention": lambda **o: pyg.GeneralConv(PAIR, 6, attention=True, heads=2, **o),
    "GINConv": lambda **o: pyg.GINConv(_mlp(F), train_eps=True, **o),
    "GINConv fixed eps": lambda **o: pyg.GINConv(_mlp(F), eps=0.2, **o),
    "GINEConv": lambda **o: pyg.GINEConv(_mlp(F), edge_dim=EDGE_FEATURES, **o),
    "GMMConv": lambda **o: pyg.GMMConv(PAIR, 6, dim=EDGE_FEATURES, kernel_size=2, **o),
    "GraphConv": lambda **o: pyg.GraphConv(PAIR, 6, **o),
    "GraphConv min": lambda **o: pyg.GraphConv(PAIR, 12, aggr="min", **o),
    "HEATConv": lambda **o: pyg.HEATConv(F, 6, 3, RELATIONS, 4, EDGE_FEATURES, 4, heads=2, **o),
    "LEConv": lambda **o: pyg.LEConv(PAIR, 6, **o),
    "LGConv": lambda **o: pyg.LGConv(**o),
    "MFConv": lambda **o: pyg.MFConv(PAIR, 6, max_degree=4, **o),
    "MixHopConv": lambda **o: pyg.MixHopConv(F, 6, **o),
    "NNConv": lambda **o: pyg.NNConv(PAIR, 6, nn.Linear(EDGE_FEATURES, F * 6), **o),
    "PDNConv": lambda **o: pyg.PDNConv(F, 6, EDGE_FEATURES, 4, **o),
    "PNAConv": lambda **o: pyg.PNAConv(
        F, 6, ["mean", "max", "std"], ["identity", "amplification"], DEGREES, **o
    ),
    "PNAConv edges": lambda **o: pyg.PNAConv(
        F,
        6,
        ["mean", "min", "var"],
        ["identity", "linear"],
        DEGREES,
        edge_dim=EDGE_FEATURES,
        pre_layers=2,
        **o,
    ),
    "ResGatedGraphConv": lambda **o: pyg.ResGatedGraphConv(PAIR, 6, **o),
    "RGATConv": lambda **o: _rgat(**o),
    "RGCNConv": lambda **o: pyg.RGCNConv(PAIR, 6, RELATIONS, **o),
    "RGCNConv bases": lambda **o: pyg.RGCNConv(F, 6, RELATIONS, num_bases=2, aggr="max", **o),
    "FastRGCNConv": lambda **o: pyg.FastRGCNConv(PAIR, 6, RELATIONS, **o),
    "SAGEConv": lambda **o: pyg.SAGEConv(PAIR, 6, **o),
    "SAGEConv max": lambda **o: pyg.SAGEConv(PAIR, 12, aggr="max", **o),
    "SAGEConv list": lambda **o: pyg.SAGEConv(PAIR, 6, aggr=["mean", "std"], **o),
    "SAGEConv project": lambda **o: pyg.SAGEConv(F, 6, project=True, normalize=True, **o),
    "SGConv": lambda **o: pyg.SGConv(F, 6, K=2, **o),
    "SimpleConv": lambda **o: pyg.SimpleConv(**o),
    "SimpleConv max": lambda **o: pyg.SimpleConv(aggr="max", combine_root="sum", **o),
    "SSGConv": lambda **o: pyg.SSGConv(F, 6, 0.1, K=2, **o),
    "SuperGATConv": lambda **o: pyg.SuperGATConv(F, 3, heads=2, **o),
    "TAGConv": lambda **o: pyg.TAGConv(F, 6, K=2, **o),
    "TransformerConv": lambda **o: pyg.TransformerConv(PAIR, 3, heads=2, **o),
    "TransformerConv beta": lambda **o: pyg.TransformerConv(
        PAIR, 3, heads=2, beta=True, edge_dim=EDGE_FEATURES, concat=False, **o
    ),
    "WLConvContinuous": lambda **o: pyg.WLConvContinuous(**o),
}


def arguments_of(name: str, generator: torch.Generator) -> dict[str, Any]:
    """Arguments of the layer's call besides nodes and edges."""
    kind = name.split()[0]

    def attributes(*shape: int) -> Tensor:
        return torch.rand(EDGES, *shape, generator=generator)

    def types() -> Tensor:
        return torch.randint(0, RELATIONS, (EDGES,), generator=generator)

    if kind in ("RGCNConv", "FastRGCNConv", "RGATConv"):
        return {"edge_type": types()}
    if kind == "HEATConv":
        nodes = torch.randint(0, 3, (SOURCES,), generator=generator)
        return {"node_type": nodes, "edge_type": types(), "edge_attr": attributes(EDGE_FEATURES)}
    if kind in ("GINEConv", "GMMConv", "NNConv", "PDNConv") or name.endswith((" edges", " beta")):
        return {"edge_attr": attributes(EDGE_FEATURES)}
    if kind in ("FAConv", "GCN2Conv"):
        return {"x_0": torch.randn(SOURCES, FEATURES, generator=generator)}
    return {}
