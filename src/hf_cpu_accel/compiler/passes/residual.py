"""What is added to the output of a linear layer, or of a gated FFN: into the epilogue of the product."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.reading import FLOATING, args_of, is_call, is_tensor, same_sizes, value
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
    target: Any = product.target
    place = [argument.name for argument in target._schema.arguments].index("residual")
    arguments = list(args_of(product))
    if len(product.users) != 1 or arguments[place] is not None or rewriter.is_written(product, residual):
        return False
    before, added, after = (value(part) for part in (product, residual, node))
    if (
        added.dtype not in FLOATING
        or after.dtype is not before.dtype
        or not same_sizes(before.shape, added.shape)
    ):
        return False
    arguments[place] = residual
    rewriter.replace(node, rewriter.call(node, target, *arguments))
    return True
