"""Forwards of layers that normalize, or transform features before or after the sum.

Each equals the `forward` of its layer class. It returns NotImplemented for calls that it does not support, which then run that
`forward`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GCNConv, GINConv, GraphConv, SAGEConv
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense import Linear

from hf_cpu_accel.graph.dense import are_plain, dense
from hf_cpu_accel.graph.forward import graph_of
from hf_cpu_accel.graph.propagate import FastPropagate, aggregate, is_small_step, keeps_dtype

LINEAR_REDUCTIONS = ("sum", "mean")  # linear maps may be applied before or after these


def _is_plain_weight(weight: Any, edge_index: Any, x: Tensor) -> bool:
    """Return whether the weight is None, or one number per edge without a gradient."""
    if weight is None:
        return True
    plain = isinstance(weight, Tensor) and weight.is_floating_point() and not weight.requires_grad
    return plain and weight.shape == edge_index.shape[1:] and keeps_dtype(weight, x)


def gcn(conv: GCNConv, propagate: FastPropagate, x: Any, edge_index: Any, edge_weight: Any = None) -> Any:
    """Compute GCNConv (Kipf & Welling 2017, arXiv:1609.02907), with the normalization cached with the graph."""
    # What `improved` does to edges without weights has changed between versions.
    if (
        not isinstance(x, Tensor)
        or not _is_plain_weight(edge_weight, edge_index, x)
        or not conv.normalize
        or conv.improved
        or conv.cached
        or propagate.reduce != "sum"
        or not are_plain(conv.lin)
    ):
        return NotImplemented
    graph = graph_of(conv, propagate, edge_index, x, None, loops=conv.add_self_loops)
    if graph is None:
        return NotImplemented
    value = graph[0].normalized(edge_index, edge_weight)
    bias = conv.bias
    if conv.in_channels < conv.out_channels:
        return dense(aggregate(graph[0], x, "sum", value), conv.lin.weight, bias)
    return aggregate(graph[0], dense(x, conv.lin.weight), "sum", value, bias=bias)


def _neighbors_and_root(
    conv: MessagePassing,
    propagate: FastPropagate,
    x: Any,
    edge_index: Any,
    size: Any,
    linears: tuple[Linear, Linear | None],
) -> Any:
    """Compute lin(reduce(x_source)) + root(x_target), with `lin` first where that reduces fewer features."""
    graph = graph_of(conv, propagate, edge_index, x, size)
    if graph is None or propagate.reduce is None or not are_plain(*linears):
        return NotImplemented
    adjacency, source, target = graph
    if is_small_step(conv, edge_index, source):
        return NotImplemented
    lin, root = linears
    if propagate.reduce in LINEAR_REDUCTIONS and lin.out_channels < lin.in_channels:
        addend = None if root is None or target is None else dense(target, root.weight)
        mapped = dense(source, lin.weight)
        return aggregate(adjacency, mapped, propagate.reduce, addend=addend, bias=lin.bias)
    output = dense(aggregate(adjacency, source, propagate.reduce), lin.weight, lin.bias)
    return output if root is None or target is None else dense(target, root.weight, addend=output)


def sage(conv: SAGEConv, propagate: FastPropagate, x: Any, edge_index: Any, size: Any = None) -> Any:
    """Compute SAGEConv (Hamilton, Ying & Leskovec 2017, arXiv:1706.02216)."""
    if conv.project:
        if not isinstance(x, Tensor):
            return NotImplemented
        x = (conv.lin(x).relu(), x)
    output = _neighbors_and_root(
        conv, propagate, x, edge_index, size, (conv.lin_l, conv.lin_r if conv.root_weight else None)
    )
    if conv.normalize and output is not NotImplemented:
        output = F.normalize(output, p=2.0, dim=-1)
    return output


def graph_conv(
    conv: GraphConv,
    propagate: FastPropagate,
    x: Any,
    edge_index: Any,
    edge_weight: Any = None,
    size: Any = None,
) -> Any:
    """Compute GraphConv without edge weights (Morris et al. 2019, arXiv:1810.02244)."""
    if edge_weight is not None:
        return NotImplemented
    return _neighbors_and_root(conv, propagate, x, edge_index, size, (conv.lin_rel, conv.lin_root))


def gin(conv: GINConv, propagate: FastPropagate, x: Any, edge_index: Any, size: Any = None) -> Any:
    """Compute GINConv (Xu et al. 2019, arXiv:1810.00826), with (1 + eps) x added in the kernel of the sum."""
    if conv.eps.requires_grad or torch.compiler.is_compiling():
        return NotImplemented
    graph = graph_of(conv, propagate, edge_index, x, size)
    if graph is None or propagate.reduce is None or is_small_step(conv, edge_index, graph[1]):
        return NotImplemented
    adjacency, source, target = graph
    scale = 1.0 + float(conv.eps)
    return conv.nn(aggregate(adjacency, source, propagate.reduce, addend=target, addend_scale=scale))
