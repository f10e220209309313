"""Reorder the output features of packed linears for an op."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.projection_group import ProjectionGroup


def can_be_ordered(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Return whether `order_outputs` supports these children of `module`: they have no bias, and share no weight with linears
    elsewhere."""
    packed = [part for part in module.modules() if isinstance(part, PackedLinear)]
    for name in names:
        linear = module._modules[name]
        if not isinstance(linear, PackedLinear):
            return False
        group = linear.group
        members = {part.index for part in packed if part.group is group}
        biased = any(bias is not None for bias in group.biases)
        if biased or group.order is not None or len(members) != len(group.ranges):
            return False
    return True


def order_outputs(module: nn.Module, orders: Mapping[str, Tensor]) -> None:
    """Store the weights of children of `module` in these orders: {name: int64 [out_features]}. Their outputs when called do not
    change."""
    whole: dict[ProjectionGroup, Tensor] = {}
    for name, order in orders.items():
        linear = module._modules[name]
        assert isinstance(linear, PackedLinear)
        start, stop = linear.range
        places = whole.setdefault(linear.group, torch.arange(linear.group.packed.out_features))
        places[start:stop] = start + order
    made = {group: group.reordered(order) for group, order in whole.items()}
    for part in module.modules():
        if isinstance(part, PackedLinear) and part.group in made:
            part.group = made[part.group]
