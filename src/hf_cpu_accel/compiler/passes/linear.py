"""Linear layers whose weight is a parameter: `linear` on the packed weight."""

from __future__ import annotations

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.recipes import PackedLinears
from hf_cpu_accel.compiler.rewriter import Rewriter, aten

ours = torch.ops.hf_cpu_accel
FLOATING = (torch.float32, torch.bfloat16)
# Fewer output features are mostly padding of a panel.
MIN_OUT_FEATURES = 16


def apply(rewriter: Rewriter) -> int:
    count = 0
    for node in rewriter.calls(aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default):
        count += _pack(rewriter, node)
    return count


def _pack(rewriter: Rewriter, node: Node) -> bool:
    input, weight, bias, transposed = _read(node)
    if not _fits(rewriter, node, input, weight, bias):
        return False
    value = weight.meta["val"]
    out_features = int(value.shape[1 if transposed else 0])
    if out_features < MIN_OUT_FEATURES:
        return False
    dtype = rewriter.options.dtype or str(value.dtype).removeprefix("torch.")
    data, *scale = rewriter.derived(PackedLinears(dtype, transposed), [weight])
    arguments = (input, data, scale[0] if scale else None, bias, None, out_features, "none")
    rewriter.replace(node, rewriter.call(node, ours.linear.default, *arguments))
    return True


def _read(node: Node) -> tuple[Node, Node, Node | None, bool]:
    """Input, weight, bias, and whether the weight is [K, N]."""
    if node.target is aten.linear.default:
        input, weight, bias = (*node.args, None)[:3]
        return input, weight, bias, False  # type: ignore[return-value]
    if node.target is aten.addmm.default:
        bias, input, weight = node.args
        return input, weight, bias, True  # type: ignore[return-value]
    input, weight = node.args
    if isinstance(weight, Node) and _is_transposition(weight):
        return input, weight.args[0], None, False  # type: ignore[return-value]
    return input, weight, None, True  # type: ignore[return-value]


def _is_transposition(node: Node) -> bool:
    if node.target in (aten.t.default, aten.numpy_T.default):
        return True
    return node.target is aten.transpose.int and {int(d) % 2 for d in node.args[1:3]} == {0, 1}  # type: ignore[call-overload]


def _fits(rewriter: Rewriter, node: Node, input: Node, weight: Node, bias: Node | None) -> bool:
    if not rewriter.is_parameter(weight) or node.kwargs or rewriter.is_written(weight):
        return False
    value, result = weight.meta["val"], node.meta["val"]
    if value.dim() != 2 or value.dtype not in FLOATING or input.meta["val"].dim() < 2:
        return False
    if bias is not None and bias.meta["val"].dim() != 1:
        return False
    return result.dtype is input.meta["val"].dtype is value.dtype
