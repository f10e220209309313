"""Forwards of the attention layers: GATConv, GATv2Conv and TransformerConv."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

from hf_cpu_accel.graph.adjacency import Adjacency
from hf_cpu_accel.graph.dense import apply_linear
from hf_cpu_accel.graph.forward import graph_of
from hf_cpu_accel.graph.propagate import (
    FastPropagate,
    aggregate,
    is_small,
    is_small_step,
    transposed_if,
)
from hf_cpu_accel.ops.graph_attention import dot_attention, gat, gat_weights, gatv2, gatv2_weights
from hf_cpu_accel.ops.sparse import sddmm, segment_softmax, spmm_reduce


def _finish_attention(conv: GATConv | GATv2Conv, output: Tensor, residual: Tensor | None) -> Tensor:
    if not conv.concat:
        output = output.view(-1, conv.heads, conv.out_channels).mean(dim=1)
    if residual is not None:
        output = output + residual
    if conv.bias is None:
        return output
    fresh = not (torch.is_grad_enabled() and (output.requires_grad or conv.bias.requires_grad))
    return output.add_(conv.bias) if fresh else output + conv.bias


def gat_conv(
    conv: GATConv,
    propagate: FastPropagate,
    x: Any,
    edge_index: Any,
    edge_attr: Any = None,
    size: Any = None,
    return_attention_weights: Any = None,
) -> Any:
    """Compute GATConv: scores, softmax and sum in one pass, or in three with dropout or edge features."""
    adjacency = _attended(conv, propagate, x, edge_index, edge_attr, return_attention_weights, size)
    if adjacency is None or conv.lin is None:
        return NotImplemented
    residual = None if conv.res is None else conv.res(x)
    features = apply_linear(conv.lin, x)
    # <W x, a> = <x, W^T a>: two more columns per head instead of a pass over the features.
    weight = conv.lin.weight.view(conv.heads, conv.out_channels, -1)
    attention = torch.cat([conv.att_src, conv.att_dst]).unsqueeze(2)
    scores = F.linear(x, torch.matmul(attention, weight).flatten(0, 2)).float()
    source, target = scores.split(conv.heads, dim=1)
    rowptr, col, slope = adjacency.rowptr, adjacency.col, conv.negative_slope
    at_once = edge_attr is None and not _drops(conv)
    if not at_once or return_attention_weights is not None:
        edge = None if edge_attr is None else _scores_of_attributes(conv, adjacency, edge_attr)
        alpha = gat_weights(rowptr, col, source, target, slope, edge)
    if at_once:
        turned = transposed_if(adjacency, features)
        output = gat(rowptr, col, features, source, target, slope, transposed=turned)
    else:
        dropped = F.dropout(alpha, p=conv.dropout, training=conv.training)
        output = aggregate(adjacency, features, "sum", dropped)
    output = _finish_attention(conv, output, residual)
    if return_attention_weights is None:
        return output
    return output, _by_edge(adjacency, edge_index, alpha.to(x.dtype))


def _drops(conv: Any) -> bool:
    return bool(conv.training and conv.dropout > 0)


def _by_edge(adjacency: Adjacency, edge_index: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Return (edges [2, E'], weights [E', heads]) in the order of PyG: without input loops, and one loop per node at the end.

    Args:
        alpha: [entries, heads], in the order of the entries.
    """
    edges, loops = edge_index.shape[1], adjacency.loops
    weights = alpha.new_zeros(edges + max(loops, 0), alpha.shape[1])
    weights = weights.index_copy(0, adjacency.order.long(), alpha)
    if loops < 0:
        return edge_index, weights
    no_loop = edge_index[0] != edge_index[1]
    added = torch.arange(loops, dtype=edge_index.dtype).expand(2, -1)
    weights = torch.cat([weights[:edges][no_loop], weights[edges:]])
    return torch.cat([edge_index[:, no_loop], added], dim=1), weights


def _attended(
    conv: GATConv | GATv2Conv,
    propagate: FastPropagate,
    x: Any,
    edge_index: Any,
    edge_attr: Any,
    weights: Any,
    size: Any = None,
) -> Adjacency | None:
    """Return the graph of `conv`, or None if the kernels do not support the call."""
    if propagate.reduce != "sum" or not isinstance(x, Tensor):
        return None
    if weights is False or (weights is not None and (_drops(conv) or not _is_list_of_edges(edge_index))):
        return None  # versions differ on False; with dropout, the returned weights are those after dropout
    # Loops have the mean of the attributes of the edges that point to the node.
    filled = not conv.add_self_loops or (conv.fill_value == "mean" and conv.flow == "source_to_target")
    known = isinstance(edge_attr, Tensor) and conv.lin_edge is not None and filled
    if (edge_attr is not None and not known) or is_small_step(conv, edge_index, x):
        return None
    graph = graph_of(conv, propagate, edge_index, x, size, loops=conv.add_self_loops)
    return None if graph is None else graph[0]


def _columns(edge_attr: Tensor) -> Tensor:
    """Return attributes as [edges, features]; they may be one number per edge."""
    return edge_attr.unsqueeze(1) if edge_attr.dim() == 1 else edge_attr


def _scores_of_attributes(conv: GATConv, adjacency: Adjacency, edge_attr: Tensor) -> Tensor:
    """Return the scores <W e, a> = <e, W^T a> of edge attributes, [entries, heads]."""
    weight = conv.lin_edge.weight.view(conv.heads, conv.out_channels, -1)
    by_head = torch.matmul(conv.att_edge[0].unsqueeze(1), weight).squeeze(1)
    return with_loops(adjacency, F.linear(_columns(edge_attr), by_head).float()).index_select(
        0, adjacency.order
    )


def with_loops(adjacency: Adjacency, values: Tensor) -> Tensor:
    """Return `values` [edges, K] of the input edges, followed by those of the added loops: means over a node's other edges."""
    if adjacency.loops < 0:
        return values
    padded = F.pad(values, (0, 0, 0, adjacency.loops))
    total = spmm_reduce(adjacency.rowptr, adjacency.order, None, padded)[: adjacency.loops]
    others = (adjacency.rowptr.diff()[: adjacency.loops] - 1).clamp(min=1).unsqueeze(1)
    return torch.cat([values, (total / others).to(values.dtype)])


def gatv2_conv(
    conv: GATv2Conv,
    propagate: FastPropagate,
    x: Any,
    edge_index: Any,
    edge_attr: Any = None,
    return_attention_weights: Any = None,
) -> Any:
    """Compute GATv2Conv: scores, softmax and sum in one pass; with dropout or edge features, with one tensor per edge."""
    adjacency = _attended(conv, propagate, x, edge_index, edge_attr, return_attention_weights)
    if adjacency is None:
        return NotImplemented
    residual = None if conv.res is None else conv.res(x)
    source = apply_linear(conv.lin_l, x)
    target = source if conv.share_weights else apply_linear(conv.lin_r, x)
    rowptr, col, slope = adjacency.rowptr, adjacency.col, conv.negative_slope
    turned = transposed_if(adjacency, source)
    at_once = edge_attr is None and not _drops(conv)
    if not at_once or return_attention_weights is not None:
        edge = None
        if edge_attr is not None:
            edge = conv.lin_edge(with_loops(adjacency, _columns(edge_attr)))
        alpha = gatv2_weights(
            rowptr,
            col,
            source,
            target,
            conv.att[0],
            slope,
            edge=edge,
            order=adjacency.order,
            transposed=turned,
        )
    if at_once:
        output = gatv2(rowptr, col, source, target, conv.att[0], slope, transposed=turned)
    else:
        dropped = F.dropout(alpha, p=conv.dropout, training=conv.training)
        output = aggregate(adjacency, source, "sum", dropped)
    output = _finish_attention(conv, output, residual)
    if return_attention_weights is None:
        return output
    return output, _by_edge(adjacency, edge_index, alpha.to(x.dtype))


def transformer_conv(
    conv: TransformerConv,
    propagate: FastPropagate,
    x: Any,
    edge_index: Any,
    edge_attr: Any = None,
    return_attention_weights: Any = None,
) -> Any:
    """Compute TransformerConv: scores, softmax and sum in one pass, or in three with dropout or edge features.

    Attention weights are computed separately if requested, so that the output is bit-identical with and without them.
    """
    weights = return_attention_weights
    if propagate.reduce != "sum" or weights is False:
        return NotImplemented
    if weights is not None and (_drops(conv) or not _is_list_of_edges(edge_index)):
        return NotImplemented
    if (edge_attr is None) != (conv.lin_edge is None):
        return NotImplemented
    if edge_attr is not None and is_small(edge_index, conv.heads * conv.out_channels):
        return NotImplemented
    graph = graph_of(conv, propagate, edge_index, x, None)
    if graph is None:
        return NotImplemented
    adjacency, source, target = graph
    if target is None:
        return NotImplemented
    query = apply_linear(conv.lin_query, target)
    key, value = apply_linear(conv.lin_key, source), apply_linear(conv.lin_value, source)
    if edge_attr is None and not _drops(conv):
        rowptr, col, scale = adjacency.rowptr, adjacency.col, 1.0 / math.sqrt(conv.out_channels)
        turned = transposed_if(adjacency, value)
        output = dot_attention(rowptr, col, query, key, value, conv.heads, scale, transposed=turned)
    else:
        output = _attend(conv, adjacency, query, key, value, edge_attr)
    if not conv.concat:
        output = output.view(-1, conv.heads, conv.out_channels).mean(dim=1)
    if conv.root_weight:
        output = _with_root(conv, output, target)
    if return_attention_weights is None:
        return output
    weights, _ = _attention_weights(conv, adjacency, query, key, edge_attr)
    return output, _by_edge(adjacency, edge_index, weights.to(query.dtype))


def _is_list_of_edges(edge_index: Any) -> bool:
    return isinstance(edge_index, Tensor) and edge_index.layout is torch.strided


def _with_root(conv: TransformerConv, output: Tensor, target: Tensor) -> Tensor:
    """Add the root features to `output`, weighted by beta if the layer learns it."""
    root = conv.lin_skip(target)
    if conv.lin_beta is None:
        return output + root
    beta = conv.lin_beta(torch.cat([output, root, output - root], dim=-1)).sigmoid()
    return beta * root + (1 - beta) * output


def _attend(
    conv: TransformerConv,
    adjacency: Adjacency,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_attr: Tensor | None,
) -> Tensor:
    """Return the attention [targets, heads * out_channels] with W e added to keys and values, for the attributes e of each edge.

    <q, k + W e> = <q, k> + <W^T q, e>, and sum alpha (v + W e) = sum alpha v + W sum alpha e

    So only the attributes are stored per edge, once for all heads.
    """
    alpha, attributes = _attention_weights(conv, adjacency, query, key, edge_attr)
    alpha = F.dropout(alpha, p=conv.dropout, training=conv.training)
    output = aggregate(adjacency, value, "sum", alpha)
    if attributes is None:
        return output
    weight = conv.lin_edge.weight.view(conv.heads, conv.out_channels, -1)
    summed = [spmm_reduce(adjacency.rowptr, None, part, attributes) for part in alpha.unbind(1)]
    return output + (torch.stack(summed) @ weight.mT).transpose(0, 1).flatten(1)


def _attention_weights(
    conv: TransformerConv, adjacency: Adjacency, query: Tensor, key: Tensor, edge_attr: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return (weights [entries, heads], attributes [entries, features] or None), both in the order of the entries."""
    heads, width = conv.heads, conv.out_channels
    scores = sddmm(adjacency.rowptr, adjacency.col, query, key, heads)
    attributes = None
    if edge_attr is not None:
        weight = conv.lin_edge.weight.view(heads, width, -1)
        attributes = adjacency.sort(edge_attr.view(-1, weight.shape[2]))
        turned = query.view(-1, heads, width).transpose(0, 1) @ weight
        scores = scores + torch.cat(
            [sddmm(adjacency.rowptr, None, part, attributes) for part in turned], dim=1
        )
    return segment_softmax(adjacency.rowptr, scores / math.sqrt(width)), attributes
