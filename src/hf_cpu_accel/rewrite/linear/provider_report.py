"""Read the providers that serve the linears of a live model, for `explain()`."""

from __future__ import annotations

import dataclasses

from torch import nn

from hf_cpu_accel.plan import Plan, PlanItem
from hf_cpu_accel.providers.describe import describe, summary
from hf_cpu_accel.providers.route import Route
from hf_cpu_accel.rewrite.linear.container import FusedContainer
from hf_cpu_accel.rewrite.linear.layer import PackedLinear


def with_providers(plan: Plan, root: nn.Module) -> Plan:
    """Return `plan` with the providers that have served the linears of `root` so far, and the bytes of their copies."""
    assert plan.config is not None
    modules = dict(root.named_modules())
    routes: dict[int, list[Route]] = {}
    for module in modules.values():
        if isinstance(module, PackedLinear):
            routes[id(module)] = module.group.routes(module.index)
    for module in modules.values():
        if isinstance(module, FusedContainer):
            for child in module.children():
                if isinstance(child, PackedLinear):
                    routes[id(child)].append(module.provider_route)
    items = tuple(_with_provider(item, modules.get(item.name), routes) for item in plan.items)
    return dataclasses.replace(plan, items=items, providers=describe(plan.config.providers))


def _with_provider(item: PlanItem, module: nn.Module | None, routes: dict[int, list[Route]]) -> PlanItem:
    if item.reason is not None or item.packed_bytes == 0 or module is None:
        return item
    linear = next((m for m in module.modules() if isinstance(m, PackedLinear)), None)
    if linear is None:
        return item
    elsewhere = {
        row_range: provider
        for route in routes[id(linear)]
        for row_range, provider in route.elsewhere().items()
    }
    copied = linear.group.part(linear.index, linear.index).copies.nbytes
    return dataclasses.replace(item, provider=summary(elsewhere), copied_bytes=copied)
