"""What the ops of ops/messages.py compute, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.ops.sparse_reference import _check_graph, row_of_edge


def _used_messages(
    rowptr: Tensor,
    col: Tensor | None,
    order: Tensor | None,
    x: Tensor,
    target: Tensor | None,
    edge: Tensor | None,
    relu: bool,
) -> Tensor:
    """[edges, features] in float32 (float64 for that): the messages of the entries that belong to a row."""
    _check_graph(rowptr, col, x.shape[0])
    if order is not None and edge is not None:
        _check_graph(rowptr, order, edge.shape[0])
    compute = x.dtype if x.dtype is torch.float64 else torch.float32
    used = (
        int(rowptr[-1]) if len(rowptr) > 1 else 0
    )  # without rows there is nothing that an entry could belong to
    messages = (x[:used] if col is None else x.index_select(0, col[:used])).to(compute)
    if target is not None:
        messages = messages + target.to(compute).index_select(0, row_of_edge(rowptr, used))
    if edge is not None:
        messages = messages + (edge[:used] if order is None else edge.index_select(0, order[:used])).to(
            compute
        )
    return messages.relu() if relu else messages


def message_reduce_reference(
    rowptr: Tensor,
    col: Tensor | None,
    order: Tensor | None,
    x: Tensor,
    target: Tensor | None,
    edge: Tensor | None,
    relu: bool,
    reduces: str,
    ties: bool,
    *_: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The op in plain torch; differentiable."""
    messages = _used_messages(rowptr, col, order, x, target, edge, relu)
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
    output = torch.cat([parts[reduce]() for reduce in reduces.split(",")], dim=1)
    counts = torch.zeros(0, 2 * x.shape[1])
    if ties:
        reached = [(messages == extreme(largest).index_select(0, row)).float() for largest in (False, True)]
        counts = torch.cat([total(part) for part in reached], dim=1)
    return output.to(x.dtype), counts


def edge_messages_reference(
    rowptr: Tensor,
    col: Tensor | None,
    order: Tensor | None,
    x: Tensor,
    target: Tensor | None,
    edge: Tensor | None,
    relu: bool,
    *_: Tensor | None,
) -> Tensor:
    """The op in plain torch; differentiable."""
    messages = _used_messages(rowptr, col, order, x, target, edge, relu).to(x.dtype)
    rest = (x if col is None else col).shape[0] - len(messages)
    return torch.cat([messages, messages.new_zeros(rest, x.shape[1])])


def _gradients(messages: Tensor, row: Tensor, relu: bool, table: Tensor, groups: str) -> Tensor:
    """Of each message, given the target of each."""
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


def message_grad_edges_reference(
    rowptr: Tensor,
    col: Tensor | None,
    order: Tensor | None,
    x: Tensor,
    target: Tensor | None,
    edge: Tensor | None,
    relu: bool,
    table: Tensor,
    groups: str,
    with_target: bool,
    with_edge: bool,
) -> tuple[Tensor, Tensor]:
    """The op in plain torch."""
    messages = _used_messages(rowptr, col, order, x, target, edge, relu)
    row = row_of_edge(rowptr, len(messages))
    grads = _gradients(messages, row, relu, table, groups)
    features, rows = x.shape[1], rowptr.shape[0] - 1
    grad_target = torch.zeros(rows if with_target else 0, features)
    if with_target:
        grad_target.index_add_(0, row, grads)
    grad_edge = torch.zeros((x if edge is None else edge).shape[0] if with_edge else 0, features)
    if with_edge:
        entries = torch.arange(len(messages)) if order is None else order[: len(messages)].long()
        grad_edge.index_copy_(0, entries, grads)
    return grad_target, grad_edge


def message_grad_sources_reference(
    t_rowptr: Tensor, t_col: Tensor, x: Tensor, target: Tensor | None, relu: bool, table: Tensor, groups: str
) -> Tensor:
    """The op in plain torch."""
    edges = int(t_rowptr[-1])
    source, row = row_of_edge(t_rowptr, edges), t_col[:edges]
    messages = x.index_select(0, source)
    if target is not None:
        messages = messages + target.index_select(0, row)
    messages = messages.relu() if relu else messages
    grads = _gradients(messages, row, relu, table, groups)
    return torch.zeros_like(x).index_add(0, source, grads)
