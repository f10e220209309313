"""Replacement of group norms, with a SiLU after them, by `group_norm`."""

from __future__ import annotations

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.match import FLOATING, args_of, argument, is_call, same_sizes, value
from hf_cpu_accel.compiler.rewriter import Rewriter, aten

ours = torch.ops.hf_cpu_accel
_ARGUMENTS = ("input", "num_groups", "weight", "bias", "eps")


def fuse_group_norms(rewriter: Rewriter) -> int:
    """Replace group norms, with a SiLU behind them, by one op each. Return how many."""
    count = sum(_norm(rewriter, node) for node in rewriter.calls(aten.group_norm.default))
    return count + sum(_with_silu(rewriter, node) for node in rewriter.calls(aten.silu.default))


def _norm(rewriter: Rewriter, node: Node) -> bool:
    input, groups, weight, bias, eps = (argument(node, name) for name in _ARGUMENTS)
    eps = rewriter.number(eps)
    parameters = [value(vector).dtype in FLOATING for vector in (weight, bias) if vector is not None]
    fits = value(input).dtype in FLOATING and value(input).dtype is value(node).dtype and all(parameters)
    if eps is None or not fits or rewriter.is_written(input):
        return False
    norm = rewriter.call(node, ours.group_norm.default, input, groups, weight, bias, eps, "none")
    if not same_sizes(value(norm).stride(), value(node).stride()):
        return False  # views of the output were captured for another layout
    rewriter.replace(node, norm)
    return True


def _with_silu(rewriter: Rewriter, node: Node) -> bool:
    norm = args_of(node)[0]
    if not is_call(norm, ours.group_norm.default) or len(norm.users) != 1 or rewriter.is_written(norm):
        return False
    *arguments, activation = args_of(norm)
    if activation != "none" or rewriter.is_written(arguments[0]):
        return False
    rewriter.replace(node, rewriter.call(node, ours.group_norm.default, *arguments, "silu"))
    return True
