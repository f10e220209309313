"""What is added to the output of a linear layer, or of a gated FFN: into the epilogue of the product."""

from __future__ import annotations

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.match import (
    FLOATING,
    args_of,
    argument,
    is_call,
    is_tensor,
    same_sizes,
    value,
)
from hf_cpu_accel.compiler.rewriter import Rewriter, aten

ours = torch.ops.hf_cpu_accel
_PRODUCTS = (ours.linear.default, ours.gated_ffn.default)


def apply(rewriter: Rewriter) -> int:
    count = 0
    for node in rewriter.calls(aten.add.Tensor):
        if not node.kwargs:
            count += any(_fuse(rewriter, node, *pair) for pair in (args_of(node), args_of(node)[::-1]))
    return count


def _fuse(rewriter: Rewriter, node: Node, product: object, residual: object) -> bool:
    if not is_call(product, *_PRODUCTS) or not is_tensor(residual):
        return False
    if (
        len(product.users) != 1
        or argument(product, "residual") is not None
        or rewriter.is_written(product, residual)
    ):
        return False
    before, added, after = (value(part) for part in (product, residual, node))
    if (
        added.dtype not in FLOATING
        or after.dtype is not before.dtype
        or not same_sizes(before.shape, added.shape)
    ):
        return False
    rewriter.replace(node, rewriter.changed(node, product, residual=residual))
    return True
