"""Models that generate text get our cache and decode loop behind their `generate`."""

from __future__ import annotations

import sys

from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.context import Context


def accelerate_generation(context: Context) -> list[PlanItem]:
    """Override `generate` of the root and of the parts of it that are models of their own; `hf_cpu_accel.generate` says how."""
    if "transformers" not in sys.modules:
        return []
    try:
        from hf_cpu_accel.generate.hook import install
    except ImportError as error:  # a version whose caches are made of other parts
        return [PlanItem.left("generate", "generate", f"transformers' own: {error}")]
    items: list[PlanItem] = []
    for path, module in context.root.named_modules():
        if not (path and context.skipped(path)):
            items.extend(install(module, path, context.journal))
    return items
