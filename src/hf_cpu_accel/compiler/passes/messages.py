"""Replacement of the messages of graph networks, gathered by edge, weighted and summed by target, by `spmm_reduce`.

    zeros[M, K].scatter_add_(0, target, weight * x[source])       optionally divided by the number of edges of each target

The weight is one number per edge, or per edge and head for rows [heads, features] as in GAT. There is no tensor with a row per
edge. The edges are sorted by target once for all layers of a graph that use them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.match import (
    FLOATING,
    VIEWS,
    args_of,
    argument,
    axis,
    is_call,
    is_one,
    is_tensor,
    same_size,
    same_sizes,
    value,
)
from hf_cpu_accel.compiler.rewriter import Rewriter, aten

ours = torch.ops.hf_cpu_accel
_INDICES = (torch.int32, torch.int64)
_ZEROS = {aten.zeros.default: 0, aten.new_zeros.default: 1}  # and the index of the size argument
# For narrower rows, sorting the edges takes as long as the sum.
FEWEST_FEATURES = 8


@dataclass(frozen=True)
class _Sum:
    """`zeros.scatter_add_(0, index, messages)` along the rows: its nodes, and the vector of targets."""

    node: Node
    size: list[Any]
    target: Node
    messages: Node


def fuse_messages(rewriter: Rewriter) -> int:
    """Replace gather-multiply-scatter by `spmm_reduce`. Return how many."""
    sorted_edges: dict[object, Node] = {}
    sums = [entry for entry in _sums(rewriter) if value(entry.node).dim() in (2, 3)]
    fused = {}
    for entry in sums:
        reduced = _fuse(rewriter, entry, sorted_edges)
        if reduced is not None:
            fused[reduced] = _identity(entry.target)
    for node in rewriter.calls(aten.div.Tensor):
        _make_mean(rewriter, node, fused)
    rewriter.clean()
    for entry in _sums(rewriter):  # the counts of means
        if not entry.node.users and value(entry.node).dim() == 1:
            rewriter.graph.erase_node(entry.node)
    return len(fused)


def _sums(rewriter: Rewriter) -> Iterator[_Sum]:
    for node in rewriter.calls(aten.scatter_add_.default, aten.scatter_add.default):
        zeros, dim, index, messages = args_of(node)
        if not is_call(zeros, *_ZEROS) or len(zeros.users) != 1 or axis(dim, value(node).dim()) != 0:
            continue
        target = index if value(node).dim() == 1 else _column(index)
        if target is None or value(target).dim() != 1 or rewriter.times_written(node) > 1:
            continue
        target_fits = value(target).dtype in _INDICES and not rewriter.is_written(target)
        if target_fits and same_size(value(target).shape[0], value(messages).shape[0]):
            place: Any = zeros.target
            yield _Sum(node, list(args_of(zeros)[_ZEROS[place]]), target, messages)


def _column(node: object) -> Node | None:
    """Return the vector [E] that `node` [E, ...] repeats in every column, or None."""
    if not is_call(node, aten.expand_as.default, aten.expand.default):
        return None
    column = args_of(node)[0]
    if not is_tensor(column) or not all(map(is_one, value(column).shape[1:])):
        return None
    vector = args_of(column)[0] if is_call(column, *VIEWS, aten.unsqueeze.default) else None
    return vector if is_tensor(vector) and value(vector).dim() == 1 else None


def _fuse(rewriter: Rewriter, found: _Sum, sorted_edges: dict[object, Node]) -> Node | None:
    weight, gathered = _weighted(found.messages)
    if not is_call(gathered, aten.index_select.default):
        return None
    x, dim, source = args_of(gathered)
    if axis(dim, value(x).dim()) != 0 or value(source).dtype is not value(found.target).dtype:
        return None
    if value(x).dtype not in FLOATING or value(found.node).dtype is not value(x).dtype:
        return None
    (count, *row), (_, *made) = value(x).shape, value(found.node).shape
    if not same_sizes(row, made) or not _is_wide(row):
        return None
    if weight is not None and not same_sizes(value(weight).shape[1:], row[:-1]):
        return None
    if rewriter.is_written(x, source, *([] if weight is None else [weight])):
        return None
    rows, node = found.size[0], found.node
    key = (_identity(found.target), _identity(source), str(_number(rows)), str(count))
    if key not in sorted_edges:
        edges = (found.target, source, rows, rewriter.call(node, aten.sym_size.int, x, 0))
        sorted_edges[key] = rewriter.call(node, ours.coo_to_csr.default, *edges, -1, True)
    rowptr, col, order = (rewriter.call(node, operator.getitem, sorted_edges[key], i) for i in range(3))
    if weight is not None:
        weight = rewriter.call(node, aten.index_select.default, weight, 0, order)
        weight = rewriter.call(node, aten.to.dtype, weight, torch.float32)
    if len(row) == 2:
        x = rewriter.call(node, aten.flatten.using_ints, x, 1)
    parts = {"rowptr": rowptr, "col": col, "value": weight, "x": x}
    reduced = rewriter.call(node, ours.spmm_reduce.default, **parts, reduce="sum", addend_scale=1.0)
    rewriter.replace(
        node, reduced if len(row) == 1 else rewriter.call(node, aten.view.default, reduced, [rows, *row])
    )
    return reduced


def _weighted(messages: Node) -> tuple[Node | None, Node]:
    """Return the weight [E] or [E, heads] of the messages, or None, and the gathered rows."""
    if is_call(messages, aten.mul.Tensor):
        for weight, gathered in (args_of(messages), args_of(messages)[::-1]):
            if not is_call(weight, *VIEWS, aten.unsqueeze.default) or not is_tensor(gathered):
                continue
            vector = args_of(weight)[0]
            if same_sizes((*value(vector).shape, 1), value(weight).shape):
                return vector, gathered
    return None, messages


def _is_wide(row: list[Any]) -> bool:
    """Return whether the row is wide enough. Sizes of several dimensions must be numbers, which are written into the graph."""
    if any(isinstance(size, torch.SymInt) for size in row):
        return len(row) == 1
    return math.prod(row) >= FEWEST_FEATURES


def _number(size: object) -> object:
    return size.meta["val"] if isinstance(size, Node) else size


def _identity(node: Node) -> object:
    """Return a key that is equal for rows selected from the same tensor of edges, as every layer does."""
    return ("row", args_of(node)[0], args_of(node)[2]) if _is_row(node) else node


def _is_row(node: Node) -> bool:
    return is_call(node, aten.select.int) and axis(args_of(node)[1], value(args_of(node)[0]).dim()) == 0


def _make_mean(rewriter: Rewriter, node: Node, fused: dict[Node, object]) -> None:
    """Turn a fused sum into a mean, if `node` divides it by the number of edges."""
    reduced, divisor = args_of(node)
    if reduced not in fused or len(reduced.users) != 1 + (divisor.args[-1:] == (reduced,)):
        return
    clamped = _column(divisor)
    if not is_call(clamped, aten.clamp.default) or argument(clamped, "min") != 1:
        return
    if argument(clamped, "max") is not None:
        return
    for entry in _sums(rewriter):
        if entry.node is args_of(clamped)[0] and _identity(entry.target) == fused[reduced]:
            if not is_call(entry.messages, aten.new_ones.default, aten.ones.default):
                return
            mean = rewriter.changed(reduced, reduced, reduce="mean")
            rewriter.replace(node, mean)
            fused[mean] = fused.pop(reduced)
            return
