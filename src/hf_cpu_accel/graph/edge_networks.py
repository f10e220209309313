"""Forwards of layers whose messages go through a network: GINEConv and EdgeConv.

The linear part of a message is computed per node, and the parts are added as the rows are read (ops/messages/messages.py).
Hu et al. 2020, arXiv:1905.12265; Wang et al. 2019, arXiv:1801.07829.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import EdgeConv, GINEConv
from torch_geometric.nn.dense import Linear

from hf_cpu_accel.graph.forward import graph_of
from hf_cpu_accel.graph.propagate import FastPropagate, is_small, transposed_if
from hf_cpu_accel.ops.messages.messages import edge_messages, message_reduce
from hf_cpu_accel.patching.hooks import is_plain


def gine(
    conv: GINEConv, propagate: FastPropagate, x: Any, edge_index: Any, edge_attr: Any = None, size: Any = None
) -> Any:
    """Compute GINEConv: messages relu(x_j + e_ij), reduced without a tensor of messages."""
    if not isinstance(edge_attr, Tensor) or is_small(
        edge_index, (x if isinstance(x, Tensor) else x[0]).shape[-1]
    ):
        return NotImplemented
    graph = graph_of(conv, propagate, edge_index, x, size)
    if graph is None:
        return NotImplemented
    adjacency, source, target = graph
    edge = edge_attr if conv.lin is None else conv.lin(edge_attr)
    if edge.shape != (edge_index.shape[1], source.shape[1]) or edge.dtype is not source.dtype:
        return NotImplemented
    names = propagate.reduction.names
    reduced = message_reduce(
        adjacency.rowptr,
        adjacency.col,
        source,
        names,
        edge=edge,
        order=adjacency.order,
        relu=True,
        transposed=transposed_if(adjacency, source),
    )
    output = _combine(propagate, reduced, adjacency.rowptr)
    return conv.nn(output if target is None else output + (1 + conv.eps) * target)


def edge_conv(conv: EdgeConv, propagate: FastPropagate, x: Any, edge_index: Any) -> Any:
    """Compute EdgeConv: messages nn(cat(x_i, x_j - x_i)), whose first layer is (A - B) x_i + B x_j.

    With one layer there is no tensor of messages.
    """
    first = first_linear(conv.nn)
    if first is None or is_small(edge_index, first.weight.shape[0]):
        return NotImplemented
    graph = graph_of(conv, propagate, edge_index, x, None)
    if graph is None:
        return NotImplemented
    adjacency, source, target = graph
    if target is None:
        return NotImplemented
    if first.weight.shape[1] != 2 * source.shape[1] or first.weight.dtype is not source.dtype:
        return NotImplemented
    a, b = first.weight.split(source.shape[1], dim=1)
    mapped, shift = F.linear(source, b), F.linear(target, a - b, first.bias)
    rest: Any = conv.nn[1:] if isinstance(conv.nn, nn.Sequential) else nn.Sequential()
    relu = len(rest) > 0 and type(rest[0]) is nn.ReLU and is_plain(rest[0])
    rest = rest[1:] if relu else rest
    turned = transposed_if(adjacency, mapped)
    rowptr, col, names = adjacency.rowptr, adjacency.col, propagate.reduction.names
    if len(rest) == 0:
        reduced = message_reduce(rowptr, col, mapped, names, target=shift, relu=relu, transposed=turned)
    else:
        hidden = edge_messages(rowptr, col, mapped, target=shift, relu=relu, transposed=turned)
        reduced = message_reduce(rowptr, None, rest(hidden), names)
    return _combine(propagate, reduced, rowptr)


def first_linear(network: Any) -> nn.Linear | None:
    """Return `network` if it is a linear layer, or the linear layer at the start of a sequence; None otherwise."""
    first: Any = network[0] if type(network) is nn.Sequential and len(network) > 0 else network
    plain = type(first) in (nn.Linear, Linear) and is_plain(first) and is_plain(network)
    return first if plain else None


def _combine(propagate: FastPropagate, reduced: Tensor, rowptr: Tensor) -> Tensor:
    names = propagate.reduction.names
    outputs = reduced.split(max(reduced.shape[1] // len(names), 1), dim=1)
    return propagate.reduction.combine(list(outputs), rowptr.diff())
