"""Joining of linear layers that read the same tensor (query, key and value) into one product with several outputs."""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.linear import LinearCall, joined_bias
from hf_cpu_accel.compiler.rewriter import Rewriter
from hf_cpu_accel.compiler.weight_transforms import Recipe
from hf_cpu_accel.ops.linear import MAX_SPLIT
from hf_cpu_accel.packing.linear import PANEL_FEATURES

ours = torch.ops.hf_cpu_accel


def join_parallel_linears(rewriter: Rewriter) -> int:
    """Join linear layers that read the same tensor into `linear_split`. Return how many."""
    groups: dict[tuple[Node, Recipe], list[tuple[LinearCall, Node]]] = defaultdict(list)
    for node in rewriter.calls(ours.linear.default):
        call = LinearCall.of(node)
        origin = rewriter.sources_of(call.weight)
        joins = call.is_product_only and (call.bias is None or rewriter.is_constant(call.bias))
        if origin is not None and joins and call.out_features % PANEL_FEATURES == 0:
            groups[call.input, origin[0]].append((call, origin[1][0]))
    return sum(_join(rewriter, recipe, members) for (_, recipe), members in groups.items())


def _join(rewriter: Rewriter, recipe: Recipe, members: list[tuple[LinearCall, Node]]) -> bool:
    """Replace several linear layers, given with their weights, by one call."""
    if not 2 <= len(members) <= MAX_SPLIT:
        return False
    calls = [call for call, _ in members]
    first, sizes = calls[0], [call.out_features for call in calls]
    data, *scale = rewriter.derived(recipe, [weight for _, weight in members])
    bias = joined_bias(rewriter, calls)
    arguments = (first.input, data, scale[0] if scale else None, bias, sizes)
    outputs = rewriter.call(first.node, ours.linear_split.default, *arguments)
    for number, call in enumerate(calls):
        rewriter.replace(call.node, rewriter.call(call.node, operator.getitem, outputs, number))
    return True
