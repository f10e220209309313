"""The passes, in order. Each is a file with a function of a `Rewriter` that returns how often it matched.

A pass reads ATen ops (`capture.py`) and the ops of earlier passes. It changes the graph only where it can prove that the result is
the same: it checks shapes and dtypes in `meta["val"]`, that a value that disappears has one user, and that nothing writes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from hf_cpu_accel.compiler import torch_private
from hf_cpu_accel.compiler.passes import (
    activation,
    add_norm,
    attention,
    batch_norm,
    constants,
    convolution,
    encoder_layer,
    ffn,
    gated_ffn,
    group_norm,
    handwritten_attention,
    linear,
    messages,
    narrow_attention,
    norm,
    parallel_linears,
    quantized,
    residual,
    rotary,
    simplify,
)
from hf_cpu_accel.compiler.rewriter import Rewriter

PASSES: dict[str, Callable[[Rewriter], int]] = {
    "simplify": simplify.remove_no_ops,
    "constants": constants.fold_constants,
    "quantized": quantized.mark_quantized,  # after `constants`, which computes widened weights; before the passes that pack them
    "messages": messages.fuse_messages,
    "batch_norm": batch_norm.fold_batch_norms,  # before `convolution`, which packs the folded weights
    "convolution": convolution.lower_convolutions,
    "norm": norm.fuse_norms,
    "group_norm": group_norm.fuse_group_norms,
    "rotary": rotary.fuse_rotary,
    "attention": attention.lower_attention,
    "handwritten_attention": handwritten_attention.fuse_handwritten_attention,
    "linear": linear.pack_linears,
    "views": simplify.remove_no_ops,  # again: attention and linear leave views and transpositions that cancel
    "gated_ffn": gated_ffn.fuse_gated_ffns,
    "parallel_linears": parallel_linears.join_parallel_linears,
    "activation": activation.fuse_activations,
    "residual": residual.fuse_residuals,
    "ffn": ffn.fuse_ffns,
    "add_norm": add_norm.fuse_add_norms,
    "encoder_layer": encoder_layer.fuse_encoder_layers,
    "narrow_attention": narrow_attention.narrow_attention,
}


def run_passes(rewriter: Rewriter, skip: Collection[str] = ()) -> dict[str, int]:
    """Run all passes except those in `skip`. Return {pass: matches}, and add them to Dynamo's counters."""
    rewrites = {}
    counters = torch_private.counters("hf_cpu_accel")
    for name, run in PASSES.items():
        if name in skip:
            continue
        rewrites[name] = run(rewriter)
        counters[name] += rewrites[name]
        rewriter.clean()
    return rewrites
