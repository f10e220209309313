"""The replacements of forward or propagate, by layer class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_geometric.nn import (
    EdgeConv,
    FastRGCNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GINEConv,
    GraphConv,
    HGTConv,
    PNAConv,
    RGCNConv,
    SAGEConv,
    TransformerConv,
)
from torch_geometric.nn.conv import MessagePassing

from hf_cpu_accel.graph.attention import gat_conv, gatv2_conv, transformer_conv
from hf_cpu_accel.graph.convolutions import gcn, gin, graph_conv, sage
from hf_cpu_accel.graph.edge_networks import edge_conv, gine
from hf_cpu_accel.graph.hetero import hgt_propagate
from hf_cpu_accel.graph.pna import pna
from hf_cpu_accel.graph.relational import fast_rgcn, rgcn

FORWARDS: dict[type[MessagePassing], Callable[..., Any]] = {
    GCNConv: gcn,
    SAGEConv: sage,
    GraphConv: graph_conv,
    GINConv: gin,
    GINEConv: gine,
    EdgeConv: edge_conv,
    GATConv: gat_conv,
    GATv2Conv: gatv2_conv,
    TransformerConv: transformer_conv,
    PNAConv: pna,
    RGCNConv: rgcn,
    FastRGCNConv: fast_rgcn,
}
"""The replaced forward of each layer class. Subclasses that override one of its methods are not replaced."""

PROPAGATES: dict[type[MessagePassing], Callable[..., Any]] = {HGTConv: hgt_propagate}
"""The replaced `propagate` of layer classes whose forward is not replaced."""
