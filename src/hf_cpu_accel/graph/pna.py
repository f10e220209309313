"""PNAConv: all aggregates of a node's neighbors from one read of their rows. Corso et al. 2020, arXiv:2004.05718.

The input of the first layer of `pre_nns` is cat(x_i, x_j, e_ij). Its weight is split in three, and each part is multiplied once per
node or edge, instead of once per edge as in the layer itself. The input of the first layer of `post_nns` is every aggregate times
every scale of the degree. Scales are factors of whole rows, so the aggregates are multiplied by the weights first, then scaled.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import PNAConv

from hf_cpu_accel.graph.adjacency import Adjacency
from hf_cpu_accel.graph.forward import graph_of
from hf_cpu_accel.graph.propagate import FastPropagate, transposed_if
from hf_cpu_accel.graph.reduction import degree_scales
from hf_cpu_accel.ops.messages.messages import edge_messages, message_reduce


def pna(
    conv: PNAConv, propagate: FastPropagate, x: Any, edge_index: Any, edge_attr: Tensor | None = None
) -> Any:
    """Compute PNAConv; NotImplemented for calls that the kernels do not support."""
    names = propagate.reduction.names
    if not isinstance(x, Tensor) or (edge_attr is None) != (conv.edge_dim is None):
        return NotImplemented
    graph = graph_of(conv, propagate, edge_index, x, None)
    if (
        graph is None
        or conv.post_nns[0][0].in_channels != (1 + len(names) * len(conv.aggr_module.scaler)) * conv.F_in
    ):
        return NotImplemented
    adjacency = graph[0]
    reduced = _aggregates(conv, adjacency, x, edge_attr, names)
    scales = degree_scales(conv.aggr_module, adjacency.rowptr.diff(), x.dtype)
    outputs = []
    for tower, network in enumerate(conv.post_nns):
        part = x[:, tower * conv.F_in : (tower + 1) * conv.F_in] if conv.divide_input else x
        hidden = _scaled_linear(network[0], part, reduced[:, :, tower].flatten(1), scales)
        outputs.append(network[1:](hidden) if len(network) > 1 else hidden)
    return conv.lin(torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0])


def _aggregates(
    conv: PNAConv, adjacency: Adjacency, x: Tensor, edge_attr: Tensor | None, names: tuple[str, ...]
) -> Tensor:
    """Return the aggregates of the messages, [nodes, aggregates, towers, F_in]."""
    parts = _message_parts(conv, x, edge_attr)
    target, source, edge = parts
    shared: dict[str, Any] = {"target": target, "edge": edge, "order": adjacency.order}
    shared["transposed"] = transposed_if(adjacency, *parts)
    if len(conv.pre_nns[0]) == 1:
        reduced = message_reduce(adjacency.rowptr, adjacency.col, source, names, **shared)
    else:
        relu = type(conv.pre_nns[0][1]) is nn.ReLU
        hidden = edge_messages(adjacency.rowptr, adjacency.col, source, relu=relu, **shared)
        towers = hidden.view(-1, conv.towers, conv.F_in).unbind(1)
        networks = [network[2 if relu else 1 :] for network in conv.pre_nns]
        messages = [network(part) for network, part in zip(networks, towers, strict=True)]
        stacked = torch.cat(messages, dim=1) if len(messages) > 1 else messages[0]
        reduced = message_reduce(adjacency.rowptr, None, stacked, names)
    return reduced.view(-1, len(names), conv.towers, conv.F_in)


def _message_parts(
    conv: PNAConv, x: Tensor, edge_attr: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the outputs of the first layers of all towers for the targets, the sources and the edges: [.., towers * F_in] each."""
    width = conv.F_in
    firsts = [network[0] for network in conv.pre_nns]
    weight = torch.stack([linear.weight for linear in firsts]) if len(firsts) > 1 else firsts[0].weight[None]
    bias = torch.cat([linear.bias for linear in firsts]) if len(firsts) > 1 else firsts[0].bias
    target, source = weight[:, :, :width], weight[:, :, width : 2 * width]
    edge = None
    if edge_attr is not None:
        edge = F.linear(conv.edge_encoder(edge_attr), weight[:, :, 2 * width :].flatten(0, 1))
    if not conv.divide_input:
        return F.linear(x, target.flatten(0, 1), bias), F.linear(x, source.flatten(0, 1)), edge
    by_tower = x.view(-1, conv.towers, width).transpose(0, 1)
    parts = [(by_tower @ part.mT).transpose(0, 1).flatten(1) for part in (target, source)]
    return parts[0] + bias, parts[1], edge


def _scaled_linear(linear: nn.Linear, x: Tensor, aggregates: Tensor, scales: list[Tensor | None]) -> Tensor:
    """Compute linear(cat(x, scales[0] * aggregates, scales[1] * aggregates, ..))."""
    weights = linear.weight.split([x.shape[1], *[aggregates.shape[1]] * len(scales)], dim=1)
    output = F.linear(x, weights[0], linear.bias)
    for weight, scale in zip(weights[1:], scales, strict=True):
        if scale is None:
            output = torch.addmm(output, aggregates, weight.t())
        else:
            output = torch.addcmul(output, scale.unsqueeze(1), aggregates @ weight.t())
    return output
