"""Gradients of the ops of ops/sparse.py, computed by the same ops: a sum over the transposed graph, a product per edge.

The graph itself has no gradient, only features and values. Gradients can be differentiated again: kernels that compute gradients
have none, so where autograd records the backward pass (`create_graph=True`) differentiable ops replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.registry import NAMESPACE, library
from hf_cpu_accel.ops.sparse import Transposed, csr_transpose, sddmm, spmm_reduce
from hf_cpu_accel.ops.sparse_reference import row_of_edge, spmm_reduce_reference


def reference_gradients(
    reference: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradient of `reference(*inputs)` for each input, recorded by autograd; None for an input that needs none.

    Args:
        reference: an op in plain torch, which is differentiable any number of times.
        inputs: the arguments of `reference`. The same tensor may occur several times.
        grad: the gradient of the output, in its shape.
    """
    # Views, so that a tensor that occurs twice has two gradients.
    views = [None if part is None else part.view_as(part) for part in inputs]
    wanted = [part for part in views if part is not None and part.requires_grad]
    grads = iter(torch.autograd.grad(reference(*views), wanted, grad, create_graph=True, allow_unused=True))
    return [next(grads) if part is not None and part.requires_grad else None for part in views]


def _transpose_of(ctx: Any, rowptr: Tensor, col: Tensor, sources: int) -> Transposed:
    transposed = ctx.transposed
    return transposed if transposed[0] is not None else csr_transpose(rowptr, col, sources)


def _save_spmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rowptr, col, value, x, ctx.reduce, _, ctx.addend_scale, _, *transposed = inputs
    ctx.transposed = tuple(transposed)
    ctx.sources, ctx.heads = x.shape[0], None if value is None or value.dim() == 1 else value.shape[1]
    needs_x = value is not None and value.requires_grad
    ctx.save_for_backward(rowptr, col, value, x if needs_x else None)


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rowptr, col, value, x = ctx.saved_tensors
    if ctx.reduce not in ("sum", "mean"):
        raise RuntimeError(
            "torch.ops.hf_cpu_accel.spmm_reduce has no gradient with min or max; call hf_cpu_accel.ops.sparse.spmm_reduce"
        )
    _, _, needs_value, needs_x, _, needs_addend, _, needs_bias, *_ = ctx.needs_input_grad
    scaled = grad
    if ctx.reduce == "mean":
        scaled = (grad / rowptr.diff().clamp(min=1).unsqueeze(1)).to(grad.dtype)
    grad_x = grad_value = None
    if needs_x and col is None:
        grad_x = _spread(scaled, rowptr, value, ctx.sources)
    elif needs_x:
        t_rowptr, t_col, t_order = _transpose_of(ctx, rowptr, col, ctx.sources)
        t_value = None if value is None else value.index_select(0, t_order)
        grad_x = spmm_reduce(t_rowptr, t_col, t_value, scaled, "sum")
    if needs_value:
        grad_value = sddmm(rowptr, col, scaled.contiguous(), x, ctx.heads or 1)
        grad_value = grad_value if ctx.heads else grad_value.squeeze(1)
    grad_addend = ctx.addend_scale * grad if needs_addend else None
    grad_bias = grad.float().sum(0) if needs_bias else None
    return None, None, grad_value, grad_x, None, grad_addend, None, grad_bias, None, None, None


def _spread(grad: Tensor, rowptr: Tensor, value: Tensor | None, edges: int) -> Tensor:
    """Return the gradient of a segment sum: each edge has the gradient of its row."""
    used = rowptr[-1]
    messages = grad.index_select(0, row_of_edge(rowptr, edges))
    if value is not None:
        heads = 1 if value.dim() == 1 else value.shape[1]
        messages = messages.view(edges, heads, -1) * value.view(edges, heads, 1).to(grad.dtype)
        messages = messages.flatten(1)
    beyond = torch.arange(edges) >= used
    return messages.masked_fill(beyond.unsqueeze(1), 0)


def _save_extreme(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rowptr, col, value, x, ctx.reduce, *transposed = inputs
    ctx.transposed = tuple(transposed)
    ctx.save_for_backward(rowptr, col, value, x, *output)
    ctx.mark_non_differentiable(output[1])


def _extreme_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    rowptr, col, value, x, output, ties = ctx.saved_tensors
    if torch.is_grad_enabled():

        def extreme(value: Tensor | None, x: Tensor) -> Tensor:
            return spmm_reduce_reference(rowptr, col, value, x, ctx.reduce)

        grad_value, grad_x = reference_gradients(extreme, (value, x), grad)
        return None, None, grad_value, grad_x, None, None, None, None
    shared = (grad / ties).to(x.dtype)
    grad_x = grad_value = None
    if ctx.needs_input_grad[3] and col is None:
        row = row_of_edge(rowptr, x.shape[0])
        weight = 1.0 if value is None else value.unsqueeze(1)
        reached = (x * weight == output.index_select(0, row)) & (torch.arange(len(x)) < rowptr[-1]).unsqueeze(
            1
        )
        grad_x = torch.where(reached, shared.index_select(0, row), 0.0) * weight
    elif ctx.needs_input_grad[3]:
        t_rowptr, t_col, t_order = _transpose_of(ctx, rowptr, col, x.shape[0])
        t_value = None if value is None else value.index_select(0, t_order)
        grad_x = torch.ops.hf_cpu_accel.spmm_extreme_backward(t_rowptr, t_col, t_value, x, output, shared)
    if ctx.needs_input_grad[2]:
        edges = value.shape[0]
        row, sources = row_of_edge(rowptr, edges), x if col is None else x.index_select(0, col)
        reached = sources * value.unsqueeze(1) == output.index_select(0, row)
        parts = torch.where(reached, shared.index_select(0, row), 0.0) * sources
        grad_value = parts.sum(1) * (torch.arange(edges) < rowptr[-1])
    return None, None, grad_value, grad_x, None, None, None, None


def _save_sddmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.heads = inputs[4]


def _sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rowptr, col, a, b = ctx.saved_tensors
    grad_a = grad_b = None
    if ctx.needs_input_grad[2]:
        grad_a = spmm_reduce(rowptr, col, grad, b)
    if ctx.needs_input_grad[3] and col is None:
        grad_b = _spread(a, rowptr, grad, b.shape[0])
    elif ctx.needs_input_grad[3]:
        t_rowptr, t_col, t_order = csr_transpose(rowptr, col, b.shape[0])
        grad_b = spmm_reduce(t_rowptr, t_col, grad.index_select(0, t_order), a)
    return None, None, grad_a, grad_b, None


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _softmax_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rowptr, softmax = ctx.saved_tensors
    if torch.is_grad_enabled():
        weighted = spmm_reduce(rowptr, None, None, softmax * grad)
        return None, softmax * (grad - weighted.index_select(0, row_of_edge(rowptr, len(grad))))
    return None, torch.ops.hf_cpu_accel.segment_softmax_backward(rowptr, softmax, grad.contiguous())


for _name, _backward, _setup in (
    ("spmm_reduce", _spmm_backward, _save_spmm),
    ("spmm_extreme", _extreme_backward, _save_extreme),
    ("sddmm", _sddmm_backward, _save_sddmm),
    ("segment_softmax", _softmax_backward, _save_softmax),
):
    torch.library.register_autograd(f"{NAMESPACE}::{_name}", _backward, setup_context=_setup, lib=library)
