"""Fusion of a sum and its norm, if the model uses both, into one pass over memory.

Earlier passes fuse most sums into the epilogue of a linear layer. The remaining ones are of branches with a norm of their own (OLMo
2, Gemma 3), and of parallel branches. Sums of values that Inductor computes are not fused, because Inductor adds while it computes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.match import FLOATING, args_of, is_call, is_tensor, same_sizes, value
from hf_cpu_accel.compiler.rewriter import Rewriter, aten

ours = torch.ops.hf_cpu_accel
_WITH_SUM = {
    ours.layer_norm.default: ours.add_layer_norm.default,
    ours.rms_norm.default: ours.add_rms_norm.default,
}


def fuse_add_norms(rewriter: Rewriter) -> int:
    """Replace a sum and its norm, both of them used, by one op. Return how many."""
    return sum(_fuse(rewriter, node) for node in rewriter.calls(*_WITH_SUM))


def _fuse(rewriter: Rewriter, node: Node) -> bool:
    total, *rest = args_of(node)
    if not is_call(total, aten.add.Tensor) or total.kwargs or len(total.users) < 2:
        return False
    input, residual = args_of(total)
    if not is_tensor(input) or not is_tensor(residual) or rewriter.is_written(total, input, residual):
        return False
    first, second, after = value(input), value(residual), value(total)
    if not same_sizes(first.shape, after.shape) or not same_sizes(second.shape, after.shape):
        return False
    if first.dtype is not after.dtype or second.dtype not in FLOATING:
        return False
    # The other arguments of the norm must be available before the sum.
    available = all(part.op == "placeholder" for part in node.all_input_nodes if part is not total)
    if not available or not (_is_in_memory(input) and _is_in_memory(residual)):
        return False
    target: Any = node.target
    both = rewriter.call(total, _WITH_SUM[target], input, residual, *rest)
    for old, place in ((node, 0), (total, 1)):
        rewriter.replace(old, rewriter.call(total, operator.getitem, both, place))
    return True


def _is_in_memory(node: Node) -> bool:
    """Return whether the value is in memory with or without the sum: an op of this package writes or reads it."""
    if is_call(node, operator.getitem):
        node = args_of(node)[0]
    return any(str(other.target).startswith("hf_cpu_accel.") for other in (node, *node.users))
