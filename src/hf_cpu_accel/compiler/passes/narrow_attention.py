"""Attention over long sequences in bfloat16, in float32 graphs whose weights round as coarsely (bfloat16 or integers).

The replaced modules of diffusers do the same outside of graphs (rewrite/attention/processor.py), and so does `encoder_layer`. In a
bfloat16 graph, queries in float32 are intended, so the pass does nothing.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from hf_cpu_accel.compiler import torch_private
from hf_cpu_accel.compiler.passes.match import args_of, value
from hf_cpu_accel.compiler.rewriter import Rewriter
from hf_cpu_accel.packing.linear import dtype_of
from hf_cpu_accel.providers.attention import LONG
from hf_cpu_accel.runtime import hardware

ours = torch.ops.hf_cpu_accel
_CONVERT = torch.ops.prims.convert_element_type.default
_LINEARS = (ours.linear.default, ours.linear_split.default, ours.ffn.default, ours.gated_ffn.default)
_ROUNDING = ("bfloat16", "int8", "int4")


def narrow_attention(rewriter: Rewriter) -> int:
    """Compute long attention in bfloat16 where the weights are rounded as much. Return how many."""
    if not hardware.native_bf16_is_fast():
        return 0
    linears = [args_of(node) for node in rewriter.calls(*_LINEARS)]
    if any(value(input).dtype is not torch.float32 for input, *_ in linears):
        return 0
    weights = {dtype_of(value(weight)) for _, weight, *_ in linears}
    if not weights or not weights.issubset(_ROUNDING):
        return 0
    return sum(_narrow(rewriter, node) for node in rewriter.calls(ours.attention.default))


def _narrow(rewriter: Rewriter, node: Node) -> bool:
    query, key, values, *rest = args_of(node)
    if value(query).dtype is not torch.float32 or torch_private.size_seen(value(key).shape[2]) < LONG:
        return False
    heads = [rewriter.call(node, _CONVERT, part, torch.bfloat16) for part in (query, key, values)]
    output = rewriter.call(node, ours.attention.default, *heads, *rest)
    rewriter.replace(node, rewriter.call(node, _CONVERT, output, torch.float32))
    return True
