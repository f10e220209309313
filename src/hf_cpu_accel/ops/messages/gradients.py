"""Gradients of the ops of messages.py: one table per target for all reductions of its messages, read once per edge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.messages.messages import EDGE_MESSAGES, REDUCE
from hf_cpu_accel.ops.messages.reference import message_reduce_reference
from hf_cpu_accel.ops.registry import NAMESPACE, library
from hf_cpu_accel.ops.sparse import Transposed, csr_transpose, spmm_reduce
from hf_cpu_accel.ops.sparse_gradients import reference_gradients


def _turned(ctx: Any, rowptr: Tensor, col: Tensor, sources: int) -> Transposed:
    given = ctx.transposed
    return given if given[0] is not None else csr_transpose(rowptr, col, sources)


def _save_reduce(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rowptr, col, order, x, target, edge, ctx.relu, reduces, _, *transposed = inputs
    ctx.reduces, ctx.transposed = reduces.split(","), tuple(transposed)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(rowptr, col, order, x, target, edge, *output)


def _table(
    reduces: list[str], grad: Tensor, output: Tensor, ties: Tensor, degree: Tensor
) -> tuple[Tensor, str]:
    """Return the table of a MessageGradient (csrc/sparse/messages.h), and the names of its groups."""
    features = grad.shape[1] // len(reduces)
    grads = dict(zip(reduces, grad.split(features, dim=1), strict=True))
    values = dict(zip(reduces, output.split(features, dim=1), strict=True))
    groups: dict[str, list[Tensor]] = {}
    bases = [grads["sum"]] if "sum" in grads else []
    bases += [grads["mean"] / degree] if "mean" in grads else []
    slopes = [2.0 * grads["var"] / degree] if "var" in grads else []
    if "std" in grads:
        std = values["std"]
        slopes.append(torch.where(std > 0, grads["std"] / (degree * std), 0.0))
    if slopes:
        slope = sum(slopes[1:], slopes[0])
        bases.append(-slope * values["mean"])
        groups["slope"] = [slope]
    if bases:
        groups = {"base": [sum(bases[1:], bases[0])], **groups}
    extremes = [name for name in ("min", "max") if name in grads]
    counts = dict(zip(("min", "max"), ties.split(features, dim=1), strict=True)) if extremes else {}
    for name in extremes:
        groups[name] = [values[name], grads[name] / counts[name].clamp(min=1)]
    return torch.cat([part for parts in groups.values() for part in parts], dim=1), ",".join(groups)


def _reduce_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    rowptr, col, order, x, target, edge, output, ties = ctx.saved_tensors
    if torch.is_grad_enabled():

        def reduced(*parts: Tensor | None) -> Tensor:
            return message_reduce_reference(
                rowptr, col, order, *parts, ctx.relu, ",".join(ctx.reduces), False
            )[0]

        return None, None, None, *reference_gradients(reduced, (x, target, edge), grad), *(None,) * 6
    needs_x, needs_target, needs_edge = ctx.needs_input_grad[3:6]
    degree = rowptr.diff().unsqueeze(1)
    table, groups = _table(ctx.reduces, grad.contiguous(), output, ties, degree.clamp(min=1))
    by_edge = needs_edge or (needs_x and (col is None or edge is not None))
    closed = needs_target and not ctx.relu
    grad_x: Tensor | None = None
    grad_target: Tensor | None = None
    grad_edge: Any = None
    if by_edge or (needs_target and not closed):
        grad_target, grad_edge = torch.ops.hf_cpu_accel.message_grad_edges(
            rowptr, col, order, x, target, edge, ctx.relu, table, groups, needs_target and not closed, by_edge
        )
    if closed:
        grad_target = _sum_of_gradients(ctx.reduces, grad, degree)
    if needs_x and col is None:
        grad_x, grad_edge = grad_edge, None
    elif needs_x:
        t_rowptr, t_col, t_order = _turned(ctx, rowptr, col, x.shape[0])
        if edge is None:
            grad_x = torch.ops.hf_cpu_accel.message_grad_sources(
                t_rowptr, t_col, x, target, ctx.relu, table, groups
            )
        else:
            rows = t_order if order is None else order.index_select(0, t_order)
            grad_x = spmm_reduce(t_rowptr, rows, None, grad_edge)
    wanted = grad_x, grad_target if needs_target else None, grad_edge if needs_edge else None
    return None, None, None, *wanted, *(None,) * 6


def _sum_of_gradients(reduces: list[str], grad: Tensor, degree: Tensor) -> Tensor:
    """Return the sum of a target's message gradients. A shift of all messages shifts mean, min and max, not the variance."""
    total = torch.zeros(1)
    for name, part in zip(reduces, grad.split(grad.shape[1] // len(reduces), dim=1), strict=True):
        if name == "sum":
            total = total + part * degree
        elif name in ("mean", "min", "max"):
            total = total + part * (degree > 0)
    return total.expand(grad.shape[0], grad.shape[1] // len(reduces))


def _save_messages(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rowptr, col, order, x, _, edge, relu, *transposed = inputs
    ctx.transposed = tuple(transposed)
    ctx.sources, ctx.edges = x.shape[0], None if edge is None else edge.shape[0]
    ctx.save_for_backward(rowptr, col, order, output if relu else None)


def _messages_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rowptr, col, order, messages = ctx.saved_tensors
    needs_x, needs_target, needs_edge = ctx.needs_input_grad[3:6]
    if messages is not None:
        grad = grad.masked_fill(messages == 0, 0.0)
    grad_x = grad_target = grad_edge = None
    inside = (torch.arange(grad.shape[0], dtype=torch.int32) < rowptr[-1]).unsqueeze(1)
    if needs_target:
        grad_target = spmm_reduce(rowptr, None, None, grad)
    if needs_x and col is None:
        grad_x = grad * inside
    elif needs_x:
        t_rowptr, _, t_order = _turned(ctx, rowptr, col, ctx.sources)
        grad_x = spmm_reduce(t_rowptr, t_order, None, grad)
    if needs_edge and order is None:
        grad_edge = grad.new_zeros(ctx.edges, grad.shape[1])
        grad_edge[: grad.shape[0]] = grad * inside
    elif needs_edge:
        grad_edge = grad.new_zeros(ctx.edges, grad.shape[1]).index_add(0, order, grad * inside)
    return None, None, None, grad_x, grad_target, grad_edge, None, None, None, None


for _schema, _backward, _setup in (
    (REDUCE, _reduce_backward, _save_reduce),
    (EDGE_MESSAGES, _messages_backward, _save_messages),
):
    _op = f"{NAMESPACE}::{_schema.partition('(')[0]}"
    torch.library.register_autograd(_op, _backward, setup_context=_setup, lib=library)
