"""message_reduce: several reductions of messages in one pass over the edges. edge_messages: the messages themselves.

    message(e) = x[col[e]] + target[i] + edge[order[e]]      for entry e of row i, with an optional ReLU

The first linear layer of a network on cat(x_i, x_j, e_ij) has this form once its weight is split in three: each part is multiplied
per node or edge, and no tensor of edges x features is needed. The graph is a CSR as in ops/sparse.py. Used for PNA (Corso et al.
2020, arXiv:2004.05718), GINE (Hu et al. 2020, arXiv:1905.12265) and EdgeConv (Wang et al. 2019, arXiv:1801.07829).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.abi import AGGREGATES
from hf_cpu_accel.ops.derivatives import needs_gradient, refuse_tangents
from hf_cpu_accel.ops.messages.reference import (
    EDGE_MESSAGES,
    GRAD_EDGES,
    REDUCE,
    edge_messages_reference,
    message_grad_edges_reference,
    message_grad_sources_reference,
    message_reduce_reference,
)
from hf_cpu_accel.ops.registry import by_name, declare
from hf_cpu_accel.ops.sparse import KERNEL_DTYPES, Transposed


def message_reduce(
    rowptr: Tensor,
    col: Tensor | None,
    x: Tensor,
    reduces: Sequence[str],
    *,
    target: Tensor | None = None,
    edge: Tensor | None = None,
    order: Tensor | None = None,
    relu: bool = False,
    transposed: Transposed | None = None,
) -> Tensor:
    """Reduce the messages of each row, with all reductions from one read of x.

    Args:
        rowptr: [M + 1] int32.
        col: [E] int32 below N; None where entry e reads row e of x.
        x: [N, K] float32 or bfloat16. Gradients are computed in float32. PyTorch computes other dtypes.
        reduces: one or more of "sum", "mean", "min", "max", "var" (divided by the number of messages) and "std" (the root of var; 0
            where var is at most 1e-5, as in PyTorch Geometric). Rows without edges give 0.
        target: [M, K] in the dtype of x, or None.
        edge: [E', K] in the dtype of x, or None.
        order: [E] int32 below E', each row at most once; None where entry e reads row e of `edge`.
        relu: apply a ReLU to each message.
        transposed: from `csr_transpose`, for the gradient; without it the backward pass computes it.

    Returns:
        [M, len(reduces) * K] contiguous, dtype of x: the reductions side by side. Min and max divide their gradient among ties.

    Raises:
        ValueError: an unknown reduction, or shapes that do not fit.
        TypeError: target or edge has another dtype than x.
        RuntimeError: an index in rowptr, col or order is out of range, or an input has a forward-mode tangent.
    """
    unknown = [reduce for reduce in reduces if reduce not in AGGREGATES]
    if unknown or not reduces:
        raise ValueError(f"reduces={list(reduces)!r}: expected one or more of {', '.join(AGGREGATES)}")
    _check(rowptr, x, target, edge)
    refuse_tangents("message_reduce", x, target, edge)
    if x.dtype not in KERNEL_DTYPES:
        return message_reduce_reference(rowptr, col, order, x, target, edge, relu, ",".join(reduces), False)[
            0
        ]
    if col is None and edge is not None:
        x, edge = x + (edge if order is None else edge.index_select(0, order)), None
    order = None if edge is None else order
    t_arguments = transposed or (None, None, None)
    if not needs_gradient(x, target, edge):
        return torch.ops.hf_cpu_accel.message_reduce(
            rowptr, col, order, x, target, edge, relu, ",".join(reduces), False, *t_arguments
        )[0]
    wanted = list(reduces)
    if ("var" in wanted or "std" in wanted) and "mean" not in wanted:
        wanted.append("mean")  # for the gradient
    ties = "min" in wanted or "max" in wanted
    parts = [None if part is None else part.float() for part in (x, target, edge)]
    output, _ = torch.ops.hf_cpu_accel.message_reduce(
        rowptr, col, order, *parts, relu, ",".join(wanted), ties, *t_arguments
    )
    return output[:, : len(reduces) * x.shape[1]].to(x.dtype)


def edge_messages(
    rowptr: Tensor,
    col: Tensor | None,
    x: Tensor,
    *,
    target: Tensor | None = None,
    edge: Tensor | None = None,
    order: Tensor | None = None,
    relu: bool = False,
    transposed: Transposed | None = None,
) -> Tensor:
    """Return the messages [E, K] in the order of the entries, dtype of x; arguments and errors as in `message_reduce`.

    Entries of no row give 0.
    """
    _check(rowptr, x, target, edge)
    refuse_tangents("edge_messages", x, target, edge)
    if x.dtype not in KERNEL_DTYPES:
        return edge_messages_reference(rowptr, col, order, x, target, edge, relu)
    order = None if edge is None else order
    t_arguments = transposed or (None, None, None)
    return torch.ops.hf_cpu_accel.edge_messages(rowptr, col, order, x, target, edge, relu, *t_arguments)


def _check(rowptr: Tensor, x: Tensor, target: Tensor | None, edge: Tensor | None) -> None:
    if x.dim() != 2:
        raise ValueError(f"x of shape {tuple(x.shape)}: expected [nodes, features]")
    rows, features = rowptr.shape[0] - 1, x.shape[1]
    if target is not None and target.shape != (rows, features):
        raise ValueError(f"target of shape {tuple(target.shape)}: expected {(rows, features)}")
    if edge is not None and (edge.dim() != 2 or edge.shape[1] != features):
        raise ValueError(f"edge of shape {tuple(edge.shape)}: expected [edges, {features}]")
    for name, part in (("target", target), ("edge", edge)):
        if part is not None and part.dtype is not x.dtype:
            raise TypeError(f"{name} is {part.dtype}: expected {x.dtype}, as x is")


@by_name(REDUCE)
def _reduce_fake(given: Any) -> tuple[Tensor, Tensor]:
    rows, features = given.rowptr.shape[0] - 1, given.x.shape[1]
    count, ties = len(given.reduces.split(",")), rows if given.ties else 0
    return given.x.new_empty(rows, count * features), given.x.new_empty(
        ties, 2 * features, dtype=torch.float32
    )


def _messages_fake(rowptr: Tensor, col: Tensor | None, order: Tensor | None, x: Tensor, *_: object) -> Tensor:
    return x.new_empty((x if col is None else col).shape[0], x.shape[1])


@by_name(GRAD_EDGES)
def _grad_edges_fake(given: Any) -> tuple[Tensor, Tensor]:
    x, rows = given.x, given.rowptr.shape[0] - 1 if given.with_target else 0
    edges = (x if given.edge is None else given.edge).shape[0] if given.with_edge else 0
    return x.new_empty(rows, x.shape[1]), x.new_empty(edges, x.shape[1])


declare(REDUCE, fake=_reduce_fake, reference=message_reduce_reference)
declare(EDGE_MESSAGES, fake=_messages_fake, reference=edge_messages_reference)
declare(GRAD_EDGES, fake=_grad_edges_fake, reference=message_grad_edges_reference)
declare(
    "message_grad_sources(Tensor t_rowptr, Tensor t_col, Tensor x, Tensor? target, bool relu, Tensor table, str groups) "
    "-> Tensor",
    fake=lambda t_rowptr, t_col, x, *_: x.new_empty(x.shape),
    reference=message_grad_sources_reference,
)
