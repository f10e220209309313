"""Fusion of two linear layers with an activation between them into `ffn`, without the intermediate tensor."""

from __future__ import annotations

import torch

from hf_cpu_accel.compiler.passes.linear import LinearCall
from hf_cpu_accel.compiler.passes.match import is_call
from hf_cpu_accel.compiler.rewriter import Rewriter

ours = torch.ops.hf_cpu_accel


def fuse_ffns(rewriter: Rewriter) -> int:
    """Replace two linear layers with an activation between them by `ffn`. Return how many."""
    count = 0
    for node in rewriter.calls(ours.linear.default):
        down = LinearCall.of(node)
        if not is_call(down.input, ours.linear.default) or down.activation != "none":
            continue
        up = LinearCall.of(down.input)
        if len(up.node.users) != 1 or up.residual is not None or up.activation == "none":
            continue
        if up.dtype != down.dtype:
            continue
        fused = rewriter.call(
            node,
            ours.ffn.default,
            input=up.input,
            up=up.weight,
            up_scale=up.scale,
            up_bias=up.bias,
            **down.as_last(),
            intermediate_features=up.out_features,
            activation=up.activation,
        )
        rewriter.replace(node, fused)
        count += 1
    return count
