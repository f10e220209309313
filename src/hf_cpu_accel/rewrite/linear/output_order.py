"""Packed linears in whose weight the output features lie in the order in which an op takes them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.projection_group import ProjectionGroup


def can_be_ordered(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether `order_outputs` takes these children of `module`: not where a bias would have to follow, or linears elsewhere share
    their weight."""
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
    """Have the weights of children of `module` lie in these orders: {name: int64 [out_features]}. What the linears compute when
    they are called stays as it is."""
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
