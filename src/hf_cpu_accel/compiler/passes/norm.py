"""Replacement of layer norms, and of RMS norms written out, by ops of one pass over memory each.

weight * (x * rsqrt(mean(x^2, -1) + eps))       with conversions to float32 and back allowed between

The pass `constants` has already computed Gemma's 1 + weight.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.match import (
    CONVERSIONS,
    FLOATING,
    args_of,
    argument,
    axis,
    is_call,
    is_tensor,
    unconverted,
    value,
)
from hf_cpu_accel.compiler.rewriter import Rewriter, aten

ours = torch.ops.hf_cpu_accel


def fuse_norms(rewriter: Rewriter) -> int:
    """Replace layer norms, and RMS norms written out, by one op each. Return how many."""
    count = sum(_layer_norm(rewriter, node) for node in rewriter.calls(aten.layer_norm.default))
    nodes = rewriter.calls(aten.rms_norm.default, aten.mul.Tensor, *CONVERSIONS)
    return count + sum(_rms_norm(rewriter, node) for node in nodes)


def _layer_norm(rewriter: Rewriter, node: Node) -> bool:
    input, shape, weight, bias, eps = (argument(node, name) for name in _LAYER_NORM)
    eps = rewriter.number(eps)
    if len(shape) != 1 or eps is None or not _fits(input, node) or rewriter.is_written(input):
        return False
    rewriter.replace(node, rewriter.call(node, ours.layer_norm.default, input, weight, bias, eps))
    return True


_LAYER_NORM = ("input", "normalized_shape", "weight", "bias", "eps")


def _rms_norm(rewriter: Rewriter, node: Node) -> bool:
    if node.target is aten.rms_norm.default:
        input, shape, weight, eps = (
            argument(node, name) for name in ("input", "normalized_shape", "weight", "eps")
        )
        norm = (input, weight, rewriter.number(eps)) if len(shape) == 1 else None
    else:
        norm = _written_out(rewriter, _product_of(node))
    if norm is None or norm[2] is None or not _fits(norm[0], node) or rewriter.is_written(norm[0]):
        return False
    input, weight, eps = norm
    rewriter.replace(node, rewriter.call(node, ours.rms_norm.default, input, weight, eps))
    return True


def _product_of(node: Node) -> Node:
    """Return the product that `node` converts, if nothing else uses the product; else `node`."""
    if node.target is aten.mul.Tensor:
        return node
    inner = args_of(node)[0]
    return inner if is_call(inner, aten.mul.Tensor) and len(inner.users) == 1 else node


def _fits(input: Node, node: Node) -> bool:
    return value(input).dtype in FLOATING and value(input).dtype is value(node).dtype


def _written_out(rewriter: Rewriter, node: Node) -> tuple[Node, Node, float | None] | None:
    """Return input, weight and eps of an RMS norm that ends in `node`, or None; the weight is a constant."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for weight, normed in (args_of(node), args_of(node)[::-1]):
        if not rewriter.is_constant(weight) or value(weight).dim() != 1 or not is_tensor(normed):
            continue
        product = unconverted(normed)
        if not is_call(product, aten.mul.Tensor):
            continue
        for x, factor in (args_of(product), args_of(product)[::-1]):
            eps = _factor_of(rewriter, factor, x)
            if eps is not None:
                return unconverted(x), weight, eps
    return None


def _factor_of(rewriter: Rewriter, factor: object, x: object) -> float | None:
    """Return eps if `factor` is rsqrt(mean(x^2) + eps) over the last dimension, else None."""
    if not is_call(factor, aten.rsqrt.default):
        return None
    total = args_of(factor)[0]
    if not is_call(total, aten.add.Tensor) or not is_call(args_of(total)[0], aten.mean.dim):
        return None
    mean = args_of(total)[0]
    square, dims, keepdim = (argument(mean, name) for name in ("self", "dim", "keepdim"))
    if (
        not keepdim
        or dims is None
        or [axis(d, value(square).dim()) for d in dims] != [value(square).dim() - 1]
    ):
        return None
    is_square = (
        is_call(square, aten.pow.Tensor_Scalar) and args_of(square)[0] is x and args_of(square)[1] == 2
    ) or (is_call(square, aten.mul.Tensor) and args_of(square)[0] is x and args_of(square)[1] is x)
    if not is_square and not (is_call(square, aten.square.default) and args_of(square)[0] is x):
        return None
    return rewriter.number(args_of(total)[1])
