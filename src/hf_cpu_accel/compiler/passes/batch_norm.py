"""Folding of a batch norm in inference into the weight and bias of the convolution before it."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from hf_cpu_accel.compiler.passes.match import FLOATING, args_of, argument, is_call, same_size, value
from hf_cpu_accel.compiler.rewriter import Rewriter, aten
from hf_cpu_accel.compiler.weight_transforms import FoldedNorm

_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)


def fold_batch_norms(rewriter: Rewriter) -> int:
    """Fold batch norms into the convolution before them. Return how many."""
    return sum(_fold(rewriter, node) for node in rewriter.calls(aten.batch_norm.default))


def _fold(rewriter: Rewriter, node: Node) -> bool:
    convolution, training, eps = (argument(node, name) for name in ("input", "training", "eps"))
    eps = rewriter.number(eps)
    if training or eps is None or not is_call(convolution, *_CONVOLUTIONS) or len(convolution.users) != 1:
        return False
    weight = argument(convolution, "weight")
    statistics = [argument(node, name) for name in ("running_mean", "running_var")]
    optional = [argument(convolution, "bias"), argument(node, "weight"), argument(node, "bias")]
    parameters = [weight, *statistics, *(part for part in optional if part is not None)]
    if not all(rewriter.is_constant(part) and value(part).dtype in FLOATING for part in parameters):
        return False
    if rewriter.is_written(convolution, *parameters) or value(weight).dtype is not value(node).dtype:
        return False
    if not all(same_size(value(part).shape[0], value(weight).shape[0]) for part in parameters):
        return False
    bias, scale, shift = (part is not None for part in optional)
    folded, moved = rewriter.derived(FoldedNorm(eps, (bias, scale, shift)), parameters)
    target: Any = convolution.target
    input, _, *rest = args_of(convolution)
    rewriter.replace(node, rewriter.call(node, target, input, folded, moved, *rest[1:]))
    return True
