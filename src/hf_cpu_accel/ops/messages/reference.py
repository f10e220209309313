"""The references of the ops of messages.py in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.registry import by_name
from hf_cpu_accel.ops.sparse_reference import _check_graph, row_of_edge

_MESSAGE = "Tensor rowptr, Tensor? col, Tensor? order, Tensor x, Tensor? target, Tensor? edge, bool relu"
_TRANSPOSED = "Tensor? t_rowptr, Tensor? t_col, Tensor? t_order"
REDUCE = f"message_reduce({_MESSAGE}, str reduces, bool ties, {_TRANSPOSED}) -> (Tensor, Tensor)"
EDGE_MESSAGES = f"edge_messages({_MESSAGE}, {_TRANSPOSED}) -> Tensor"
GRAD_EDGES = f"message_grad_edges({_MESSAGE}, Tensor table, str groups, bool with_target, bool with_edge) -> (Tensor, Tensor)"


def _used_messages(given: Any) -> Tensor:
    """Return the messages of the entries that belong to a row, [edges, features] in float32 (float64 for float64)."""
    rowptr, col, order, x, target, edge, relu = given[:7]
    _check_graph(rowptr, col, x.shape[0])
    if order is not None and edge is not None:
        _check_graph(rowptr, order, edge.shape[0])
    compute = x.dtype if x.dtype is torch.float64 else torch.float32
    # Without rows there is nothing that an entry could belong to.
    used = int(rowptr[-1]) if len(rowptr) > 1 else 0
    messages = (x[:used] if col is None else x.index_select(0, col[:used])).to(compute)
    if target is not None:
        messages = messages + target.to(compute).index_select(0, row_of_edge(rowptr, used))
    if edge is not None:
        edges = edge[:used] if order is None else edge.index_select(0, order[:used])
        messages = messages + edges.to(compute)
    return messages.relu() if relu else messages


@by_name(REDUCE)
def message_reduce_reference(given: Any) -> tuple[Tensor, Tensor]:
    """Compute the op in PyTorch, differentiable."""
    messages, rowptr = _used_messages(given), given.rowptr
    row, rows = row_of_edge(rowptr, len(messages)), rowptr.shape[0] - 1
    degree = rowptr.diff().clamp(min=1).unsqueeze(1)
    index = row.unsqueeze(1).expand_as(messages)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(rows, values.shape[1]).index_add(0, row, values)

    def extreme(largest: bool) -> Tensor:
        start = messages.new_full((rows, messages.shape[1]), float("-inf") if largest else float("inf"))
        found = start.scatter_reduce(0, index, messages, "amax" if largest else "amin")
        return torch.where((rowptr.diff() > 0).unsqueeze(1), found, 0.0)

    mean = total(messages) / degree
    var = total((messages - mean.index_select(0, row)).square()) / degree
    parts = {
        "sum": lambda: total(messages),
        "mean": lambda: mean,
        "min": lambda: extreme(False),
        "max": lambda: extreme(True),
        "var": lambda: var,
        "std": lambda: torch.where(var <= 1e-5, 0.0, var.clamp(min=1e-5).sqrt()),
    }
    output = torch.cat([parts[reduce]() for reduce in given.reduces.split(",")], dim=1)
    counts = torch.zeros(0, 2 * given.x.shape[1])
    if given.ties:
        reached = [(messages == extreme(largest).index_select(0, row)).float() for largest in (False, True)]
        counts = torch.cat([total(part) for part in reached], dim=1)
    return output.to(given.x.dtype), counts


@by_name(EDGE_MESSAGES)
def edge_messages_reference(given: Any) -> Tensor:
    """Compute the op in PyTorch, differentiable."""
    messages = _used_messages(given).to(given.x.dtype)
    rest = (given.x if given.col is None else given.col).shape[0] - len(messages)
    return torch.cat([messages, messages.new_zeros(rest, messages.shape[1])])


def _gradients(messages: Tensor, row: Tensor, relu: bool, table: Tensor, groups: str) -> Tensor:
    """Return the gradient of each message, given the target of each."""
    parts = iter(table.index_select(0, row).split(max(messages.shape[1], 1), dim=1))
    grad = torch.zeros_like(messages)
    for group in groups.split(","):
        if group == "base":
            grad = grad + next(parts)
        elif group == "slope":
            grad = grad + next(parts) * messages
        else:
            extreme, share = next(parts), next(parts)
            grad = grad + torch.where(messages == extreme, share, 0.0)
    return torch.where(messages == 0, 0.0, grad) if relu else grad


@by_name(GRAD_EDGES)
def message_grad_edges_reference(given: Any) -> tuple[Tensor, Tensor]:
    """Compute the op in PyTorch."""
    messages = _used_messages(given)
    row = row_of_edge(given.rowptr, len(messages))
    grads = _gradients(messages, row, given.relu, given.table, given.groups)
    features, rows, edges = (
        messages.shape[1],
        given.rowptr.shape[0] - 1,
        (given.x if given.edge is None else given.edge).shape[0],
    )
    grad_target = torch.zeros(rows if given.with_target else 0, features)
    if given.with_target:
        grad_target.index_add_(0, row, grads)
    grad_edge = torch.zeros(edges if given.with_edge else 0, features)
    if given.with_edge:
        order = given.order
        entries = torch.arange(len(messages)) if order is None else order[: len(messages)].long()
        grad_edge.index_copy_(0, entries, grads)
    return grad_target, grad_edge


def message_grad_sources_reference(
    t_rowptr: Tensor, t_col: Tensor, x: Tensor, target: Tensor | None, relu: bool, table: Tensor, groups: str
) -> Tensor:
    """Compute the op in PyTorch."""
    edges = int(t_rowptr[-1])
    source, row = row_of_edge(t_rowptr, edges), t_col[:edges]
    messages = x.index_select(0, source)
    if target is not None:
        messages = messages + target.index_select(0, row)
    messages = messages.relu() if relu else messages
    grads = _gradients(messages, row, relu, table, groups)
    return torch.zeros_like(x).index_add(0, source, grads)
