"""What is added to the output of a linear layer: into the epilogue of the product."""

from __future__ import annotations

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.linear import LinearCall
from hf_cpu_accel.compiler.passes.reading import FLOATING, args_of, is_call, is_tensor, same_sizes, value
from hf_cpu_accel.compiler.rewriter import Rewriter, aten

ours = torch.ops.hf_cpu_accel


def apply(rewriter: Rewriter) -> int:
    count = 0
    for node in rewriter.calls(aten.add.Tensor):
        if not node.kwargs:
            count += any(_fuse(rewriter, node, *pair) for pair in (args_of(node), args_of(node)[::-1]))
    return count


def _fuse(rewriter: Rewriter, node: Node, product: object, residual: object) -> bool:
    if not is_call(product, ours.linear.default) or not is_tensor(residual):
        return False
    call = LinearCall.of(product)
    if len(call.node.users) != 1 or call.residual is not None or rewriter.is_written(call.node, residual):
        return False
    before, added, after = (value(part) for part in (call.node, residual, node))
    if (
        added.dtype not in FLOATING
        or after.dtype is not before.dtype
        or not same_sizes(before.shape, added.shape)
    ):
        return False
    rewriter.replace(node, call.remade(rewriter, node, residual=residual))
    return True
