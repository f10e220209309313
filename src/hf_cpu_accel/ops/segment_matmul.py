"""segment_matmul: a matrix product with one weight per segment of rows, such as the relations of a heterogeneous graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.derivatives import refuse_tangents
from hf_cpu_accel.ops.registry import NAMESPACE, declare, library


def segment_matmul(x: Tensor, ends: Sequence[int], weight: Tensor) -> Tensor:
    """Multiply the rows [ends[r - 1], ends[r]) of x by weight[r].

    Args:
        x: [P, in], any dtype of `torch.mm`.
        ends: R ascending integers, the last one P.
        weight: [R, in, out] in the dtype of x; or [R, B, in / B, out / B] for B blocks of a block-diagonal matrix.

    Returns:
        [P, out], dtype of x. Differentiable in reverse mode, any number of times.

    Raises:
        ValueError: the sizes do not fit.
        RuntimeError: an input has a forward-mode tangent.
    """
    features = weight.shape[1] if weight.dim() == 3 else weight.shape[1] * weight.shape[2]
    if weight.dim() not in (3, 4) or x.dim() != 2 or x.shape[1] != features or len(ends) != weight.shape[0]:
        raise ValueError(
            f"x of shape {tuple(x.shape)} with {len(ends)} segments does not fit a weight of shape {tuple(weight.shape)}"
        )
    refuse_tangents("segment_matmul", x, weight)
    return torch.ops.hf_cpu_accel.segment_matmul(x, list(ends), weight)


def segment_matmul_reference(x: Tensor, ends: list[int], weight: Tensor) -> Tensor:
    """Compute the op by torch's matrix products."""
    output = _fake(x, ends, weight)
    begin = 0
    for end, matrix in zip(ends, weight.unbind(0), strict=True):
        if end > begin:
            if matrix.dim() == 2:
                torch.mm(x[begin:end], matrix, out=output[begin:end])
            else:
                output[begin:end] = (
                    torch.bmm(_blocks(x[begin:end], len(matrix)), matrix).transpose(0, 1).flatten(1)
                )
        begin = end
    return output


def segment_matmul_weight_reference(x: Tensor, ends: list[int], grad: Tensor, blocks: int) -> Tensor:
    """Compute the gradient of the weight: x^T grad of each segment."""
    output = _weight_fake(x, ends, grad, blocks)
    begin = 0
    for end, matrix in zip(ends, output.unbind(0), strict=True):
        if blocks == 0:
            torch.mm(x[begin:end].t(), grad[begin:end], out=matrix)
        else:
            torch.bmm(_blocks(x[begin:end], blocks).mT, _blocks(grad[begin:end], blocks), out=matrix)
        begin = end
    return output


def _blocks(x: Tensor, count: int) -> Tensor:
    """[blocks, rows, features of a block]"""
    return x.view(x.shape[0], count, x.shape[1] // count).transpose(0, 1)


def _fake(x: Tensor, ends: list[int], weight: Tensor) -> Tensor:
    features = weight.shape[2] if weight.dim() == 3 else weight.shape[1] * weight.shape[3]
    return x.new_empty(x.shape[0], features)


def _weight_fake(x: Tensor, ends: list[int], grad: Tensor, blocks: int) -> Tensor:
    if blocks == 0:
        return x.new_empty(len(ends), x.shape[1], grad.shape[1])
    return x.new_empty(len(ends), blocks, x.shape[1] // blocks, grad.shape[1] // blocks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.ends, weight = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    ops = torch.ops.hf_cpu_accel
    grad = grad.contiguous()
    grad_x = ops.segment_matmul(grad, ctx.ends, weight.mT) if ctx.needs_input_grad[0] else None
    grad_weight = None
    if ctx.needs_input_grad[2]:
        blocks = weight.shape[1] if weight.dim() == 4 else 0
        grad_weight = ops.segment_matmul_weight(x, ctx.ends, grad, blocks)
    return grad_x, None, grad_weight


def _save_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.ends, grad, _ = inputs
    ctx.save_for_backward(x, grad)


def _weight_backward(ctx: Any, grad_weight: Tensor) -> tuple[Tensor | None, ...]:
    x, grad = ctx.saved_tensors
    ops = torch.ops.hf_cpu_accel
    grad_x = ops.segment_matmul(grad, ctx.ends, grad_weight.mT) if ctx.needs_input_grad[0] else None
    grad_grad = ops.segment_matmul(x, ctx.ends, grad_weight) if ctx.needs_input_grad[2] else None
    return grad_x, None, grad_grad, None


declare(
    "segment_matmul(Tensor x, SymInt[] ends, Tensor weight) -> Tensor",
    fake=_fake,
    reference=segment_matmul_reference,
)
declare(
    "segment_matmul_weight(Tensor x, SymInt[] ends, Tensor grad, SymInt blocks) -> Tensor",
    fake=_weight_fake,
    reference=segment_matmul_weight_reference,
)
for _name, _gradient, _setup in (
    ("segment_matmul", _backward, _save),
    ("segment_matmul_weight", _weight_backward, _save_weight),
):
    torch.library.register_autograd(f"{NAMESPACE}::{_name}", _gradient, setup_context=_setup, lib=library)
