"""Fusion of an addition to the output of a linear layer, or of a gated FFN, into the epilogue of the product."""

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


def fuse_residuals(rewriter: Rewriter) -> int:
    """Move additions into the linear layer or gated FFN before them. Return how many."""
    sums = (node for node in rewriter.calls(aten.add.Tensor) if not node.kwargs)
    return sum(
        any(_fuse(rewriter, node, *pair) for pair in (args_of(node), args_of(node)[::-1])) for node in sums
    )


def is_residual(residual: Node, product: Node, total: Node) -> bool:
    """Return whether the epilogue of a product can add this residual."""
    before, added, after = (value(part) for part in (product, residual, total))
    return added.dtype in FLOATING and after.dtype is before.dtype and same_sizes(before.shape, added.shape)


def _fuse(rewriter: Rewriter, node: Node, product: object, residual: object) -> bool:
    if not is_call(product, *_PRODUCTS) or not is_tensor(residual):
        return False
    alone = len(product.users) == 1 and argument(product, "residual") is None
    if not alone or rewriter.is_written(product, residual) or not is_residual(residual, product, node):
        return False
    rewriter.replace(node, rewriter.changed(node, product, residual=residual))
    return True
