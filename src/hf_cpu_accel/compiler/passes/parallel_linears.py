"""Linear layers that read the same tensor (query, key and value; gate and up): one product, divided among its outputs."""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.linear import LinearCall
from hf_cpu_accel.compiler.rewriter import Rewriter
from hf_cpu_accel.compiler.weight_transforms import JoinedBiases, Recipe
from hf_cpu_accel.ops.linear import MAX_SPLIT
from hf_cpu_accel.packing.linear import PANEL_FEATURES

ours = torch.ops.hf_cpu_accel


def apply(rewriter: Rewriter) -> int:
    groups: dict[tuple[Node, Recipe], list[LinearCall]] = defaultdict(list)
    for node in rewriter.calls(ours.linear.default):
        call = LinearCall.of(node)
        made = rewriter.sources_of(call.weight)
        if made is None or not call.is_plain or not _has_joinable_bias(rewriter, call):
            continue
        groups[call.input, made[0]].append(call)
    return sum(_join(rewriter, recipe, calls) for (_, recipe), calls in groups.items())


def _has_joinable_bias(rewriter: Rewriter, call: LinearCall) -> bool:
    return call.bias is None or rewriter.is_constant(call.bias)


def _join(rewriter: Rewriter, recipe: Recipe, calls: list[LinearCall]) -> bool:
    calls = [call for call in calls if call.out_features % PANEL_FEATURES == 0]
    if not 2 <= len(calls) <= MAX_SPLIT:
        return False
    first, sizes = calls[0], [call.out_features for call in calls]
    data, *scale = rewriter.derived(recipe, [_weight(rewriter, call) for call in calls])
    bias = None
    if any(call.bias is not None for call in calls):
        given = tuple((call.out_features, call.bias is not None) for call in calls)
        (bias,) = rewriter.derived(
            JoinedBiases(given), [call.bias for call in calls if call.bias is not None]
        )
    arguments = (first.input, data, scale[0] if scale else None, bias, sizes)
    outputs = rewriter.call(first.node, ours.linear_split.default, *arguments)
    for number, call in enumerate(calls):
        rewriter.replace(call.node, rewriter.call(call.node, operator.getitem, outputs, number))
    return True


def _weight(rewriter: Rewriter, call: LinearCall) -> Node:
    made = rewriter.sources_of(call.weight)
    assert made is not None, "only packed weights are joined"
    return made[1][0]
