"""Forwards of the layers that do more around `propagate` than it knows: normalise, attend, transform before or after the sum.

Each is for a layer class whose own `forward` it equals; what a layer was asked for beyond it goes to that `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, GraphConv, SAGEConv
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense import Linear

from hf_cpu_accel.graph.adjacency import Adjacency
from hf_cpu_accel.graph.matrices import with_plain_edges
from hf_cpu_accel.graph.propagate import FastPropagate, adjacency_of, aggregate, takes
from hf_cpu_accel.ops.graph_attention import gat, gatv2
from hf_cpu_accel.ops.sparse import KERNEL_DTYPES, segment_softmax
from hf_cpu_accel.ops.sparse_reference import row_of_edge

LINEAR_REDUCTIONS = ("sum", "mean")  # a linear map may be applied before or after them


class FastForward:
    """Called in place of `conv.forward`, which stays on the class.

    Attributes:
        compute: takes the layer, its FastPropagate and the arguments of its forward; NotImplemented if they are not for it.
    """

    def __init__(self, conv: MessagePassing, propagate: FastPropagate, compute: Callable[..., Any]) -> None:
        self.conv, self.propagate, self.compute = conv, propagate, compute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain, named = with_plain_edges(self.conv, args, kwargs)
        output = self.compute(self.conv, self.propagate, *plain, **named)
        if output is NotImplemented:
            return type(self.conv).forward(self.conv, *args, **kwargs)
        self.propagate.served += 1
        return output


def _graph(
    conv: MessagePassing, propagate: FastPropagate, edge_index: Any, x: Any, size: Any, loops: bool = False
) -> tuple[Adjacency, Tensor, Tensor | None] | None:
    """The adjacency, and x of the sources and of the targets; None if `conv` has to see to the call itself."""
    source, target = (x, x) if isinstance(x, Tensor) else x
    if not takes(conv, edge_index) or not isinstance(source, Tensor) or source.dim() != 2:
        return None
    if (
        source.layout is not torch.strided
        or source.dtype not in KERNEL_DTYPES
        or (target is not None and target.dim() != 2)
    ):
        return None
    if conv.flow == "target_to_source" and not isinstance(x, Tensor):
        return None
    targets = len(source) if target is None else len(target)
    if size is not None or (not isinstance(x, Tensor) and target is None):
        return None
    added = min(targets, len(source)) if loops else -1
    adjacency = adjacency_of(conv, edge_index, targets, len(source), added)
    return None if adjacency is None else (adjacency, source, target)


def _is_plain_weight(weight: Any, edge_index: Any) -> bool:
    """One number per edge, without a gradient."""
    plain = isinstance(weight, Tensor) and weight.is_floating_point() and not weight.requires_grad
    return weight is None or (plain and weight.shape == edge_index.shape[1:])


def gcn(conv: GCNConv, propagate: FastPropagate, x: Any, edge_index: Any, edge_weight: Any = None) -> Any:
    """The normalisation depends on the graph alone, and is kept with it."""
    # What `improved` does to edges without weights has changed between versions.
    if (
        not _is_plain_weight(edge_weight, edge_index)
        or not conv.normalize
        or conv.improved
        or conv.cached
        or not isinstance(x, Tensor)
    ):
        return NotImplemented
    graph = _graph(conv, propagate, edge_index, x, None, loops=conv.add_self_loops)
    if graph is None:
        return NotImplemented
    value = graph[0].normalized(edge_index, edge_weight)
    bias = conv.bias
    if conv.in_channels < conv.out_channels:
        output = conv.lin(aggregate(graph[0], x, "sum", value))
        return output if bias is None else output + bias
    return aggregate(graph[0], conv.lin(x), "sum", value, bias=bias)


def _neighbours_and_root(
    conv: MessagePassing,
    propagate: FastPropagate,
    x: Any,
    edge_index: Any,
    size: Any,
    linears: tuple[Linear, Linear | None],
) -> Any:
    """lin(reduce(x_source)) + root(x_target), with `lin` applied first where that leaves fewer features to be reduced."""
    graph = _graph(conv, propagate, edge_index, x, size)
    if graph is None:
        return NotImplemented
    adjacency, source, target = graph
    lin, root = linears
    if propagate.reduce in LINEAR_REDUCTIONS and lin.out_channels < lin.in_channels:
        own = None if root is None or target is None else root(target)
        mapped = F.linear(source, lin.weight)
        return aggregate(adjacency, mapped, propagate.reduce, addend=own, bias=lin.bias)
    output = lin(aggregate(adjacency, source, propagate.reduce))
    if root is None or target is None:
        return output
    return torch.addmm(output, target, root.weight.t())


def sage(conv: SAGEConv, propagate: FastPropagate, x: Any, edge_index: Any, size: Any = None) -> Any:
    if conv.project:
        if not isinstance(x, Tensor):
            return NotImplemented
        x = (conv.lin(x).relu(), x)
    output = _neighbours_and_root(
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
    if edge_weight is not None:
        return NotImplemented
    return _neighbours_and_root(conv, propagate, x, edge_index, size, (conv.lin_rel, conv.lin_root))


def gin(conv: GINConv, propagate: FastPropagate, x: Any, edge_index: Any, size: Any = None) -> Any:
    """(1 + eps) x joins the sum while it is in registers."""
    if conv.eps.requires_grad or torch.compiler.is_compiling():
        return NotImplemented
    graph = _graph(conv, propagate, edge_index, x, size)
    if graph is None:
        return NotImplemented
    adjacency, source, target = graph
    scale = 1.0 + float(conv.eps)
    return conv.nn(aggregate(adjacency, source, propagate.reduce, addend=target, addend_scale=scale))


def _attends_plainly(conv: GATConv | GATv2Conv, edge_attr: Any, weights: Any) -> bool:
    return edge_attr is None and weights is None and conv.aggr_module is not None


def _finish_attention(conv: GATConv | GATv2Conv, output: Tensor, residual: Tensor | None) -> Tensor:
    if not conv.concat:
        output = output.view(-1, conv.heads, conv.out_channels).mean(dim=1)
    if residual is not None:
        output = output + residual
    if conv.bias is None:
        return output
    fresh = not (torch.is_grad_enabled() and (output.requires_grad or conv.bias.requires_grad))
    return output.add_(conv.bias) if fresh else output + conv.bias


def _edge_scores(adjacency: Adjacency, source: Tensor, target: Tensor | None) -> Tensor:
    """source[j] + target[i] per edge and head."""
    edges = adjacency.col.shape[0]
    scores = source.index_select(0, adjacency.col)
    if target is not None:
        scores = scores + target.index_select(0, row_of_edge(adjacency.rowptr, edges))
    return scores


def gat_conv(
    conv: GATConv,
    propagate: FastPropagate,
    x: Any,
    edge_index: Any,
    edge_attr: Any = None,
    size: Any = None,
    return_attention_weights: Any = None,
) -> Any:
    """Scores, softmax and sum in one pass; for training, in three differentiable ones."""
    if not _attends_plainly(conv, edge_attr, return_attention_weights) or not isinstance(x, Tensor):
        return NotImplemented
    graph = _graph(conv, propagate, edge_index, x, size, loops=conv.add_self_loops)
    if graph is None or conv.lin is None:
        return NotImplemented
    adjacency, _, _ = graph
    residual = None if conv.res is None else conv.res(x)
    features = conv.lin(x)
    # <W x, a> = <x, W^T a>: two more columns per head instead of a pass over the features.
    weight = conv.lin.weight.view(conv.heads, conv.out_channels, -1)
    attention = torch.cat([conv.att_src, conv.att_dst]).unsqueeze(2)
    scores = F.linear(x, torch.matmul(attention, weight).flatten(0, 2)).float()
    source, target = scores.split(conv.heads, dim=1)
    if (conv.training and conv.dropout > 0) or (torch.is_grad_enabled() and features.requires_grad):
        alpha = F.leaky_relu(_edge_scores(adjacency, source, target), conv.negative_slope)
        alpha = segment_softmax(adjacency.rowptr, alpha)
        alpha = F.dropout(alpha, p=conv.dropout, training=conv.training)
        output = aggregate(adjacency, features, "sum", alpha)
    else:
        output = gat(adjacency.rowptr, adjacency.col, features, source, target, conv.negative_slope)
    return _finish_attention(conv, output, residual)


def gatv2_conv(
    conv: GATv2Conv,
    propagate: FastPropagate,
    x: Any,
    edge_index: Any,
    edge_attr: Any = None,
    return_attention_weights: Any = None,
) -> Any:
    """Inference only: the gradient of the scores needs the features of each edge, which the layer's own path has."""
    if not _attends_plainly(conv, edge_attr, return_attention_weights) or not isinstance(x, Tensor):
        return NotImplemented
    if (conv.training and conv.dropout > 0) or (torch.is_grad_enabled() and _learns(conv, x)):
        return NotImplemented
    graph = _graph(conv, propagate, edge_index, x, None, loops=conv.add_self_loops)
    if graph is None:
        return NotImplemented
    adjacency, _, _ = graph
    residual = None if conv.res is None else conv.res(x)
    source = conv.lin_l(x)
    target = source if conv.share_weights else conv.lin_r(x)
    output = gatv2(adjacency.rowptr, adjacency.col, source, target, conv.att[0], conv.negative_slope)
    return _finish_attention(conv, output, residual)


def _learns(conv: nn.Module, x: Tensor) -> bool:
    return x.requires_grad or any(parameter.requires_grad for parameter in conv.parameters())


FORWARDS: dict[type[MessagePassing], Callable[..., Any]] = {
    GCNConv: gcn,
    SAGEConv: sage,
    GraphConv: graph_conv,
    GINConv: gin,
    GATConv: gat_conv,
    GATv2Conv: gatv2_conv,
}
"""Layer classes whose forward we have; subclasses that change one of its methods are not served by it."""
