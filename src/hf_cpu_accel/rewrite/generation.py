"""Give models that generate text the KV cache and decode loop of this package."""

from __future__ import annotations

import torch
from torch import nn

from hf_cpu_accel.hosts.arguments import NATIVE_ATTENTION
from hf_cpu_accel.hosts.loaded import loaded
from hf_cpu_accel.plan import Plan, PlanItem
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.decoder.layer import FusedDecoderLayer


def accelerate_generation(context: Context) -> list[PlanItem]:
    """Override `generate` of the root and of the models inside of it; see `hf_cpu_accel.generate`."""
    writers = loaded("transformers.generation.utils", "GenerationMixin")
    if not writers or not any(isinstance(module, writers) for module in context.root.modules()):
        return []
    try:
        from hf_cpu_accel.generate.hook import install
    except ImportError as error:  # a version with other cache classes
        return [PlanItem.left("generate", "generate", f"the loop of transformers runs: {error}")]
    items: list[PlanItem] = []
    for path, module in context.root.named_modules():
        if not (path and context.skipped(path)):
            dtype, speculates = _cache_dtype(module, context), context.config.speculate == "auto"
            items.extend(install(module, path, context.journal, dtype, speculates=speculates))
    return items


def with_drafts(plan: Plan, root: nn.Module) -> Plan:
    """Return `plan` with a note of the drafted and accepted tokens so far."""
    counted = [getattr(vars(module).get("generate"), "speculation", None) for module in root.modules()]
    notes = [f"speculative decoding: {drafts}" for drafts in counted if drafts is not None and drafts.calls]
    return plan.with_notes((*plan.notes, *notes)) if notes else plan


def _cache_dtype(model: nn.Module, context: Context) -> torch.dtype | None:
    """Return the dtype of the KV cache, or None for the dtype of the keys.

    Decoding is limited by memory traffic, so models with narrow weights get a narrow cache, unless keys would have to be widened
    for each token.
    """
    chosen = context.config.kv_cache
    if chosen != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}[chosen]
    return torch.bfloat16 if context.dtypes.of_model != "float32" and _reads_storage(model) else None


def _reads_storage(model: nn.Module) -> bool:
    """Return whether attention of this package runs, which reads a cache in any dtype."""
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return implementation == NATIVE_ATTENTION or any(
        isinstance(module, FusedDecoderLayer) for module in model.modules()
    )
