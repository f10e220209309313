"""Models that generate text get our cache and decode loop behind their `generate`."""

from __future__ import annotations

import sys

import torch

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
    dtype = _cache_dtype(context)
    items: list[PlanItem] = []
    for path, module in context.root.named_modules():
        if not (path and context.skipped(path)):
            items.extend(install(module, path, context.journal, dtype))
    return items


def _cache_dtype(context: Context) -> torch.dtype | None:
    """What the cache stores in; None: as the keys come. Bytes are time there too, so narrow weights get no wide cache."""
    chosen = context.config.kv_cache
    if chosen == "auto":
        return None if context.dtype == "float32" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}[chosen]
