"""Find attention with a cache in layers that are not fused, and fuse it and its layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from hf_cpu_accel.hosts.arguments import parameters_of, takes_cache
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, fused_layer
from hf_cpu_accel.plan import PlanItem, Structure
from hf_cpu_accel.rewrite.cached.attention import CachedAttention
from hf_cpu_accel.rewrite.cached.parts import CachedParts, candidates
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each, refusal_to_fuse
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.linear.layer import PERMUTED, is_permuted
from hf_cpu_accel.rewrite.mixer.match import fuse_mixer_layers
from hf_cpu_accel.rewrite.mixer.verify import first_verified

STRUCTURE = Structure("cached attention", "block")


def fuse_cached_attention(context: Context) -> list[PlanItem]:
    """Fuse all such attention. Call it after layers that one op supports are fused."""
    fused = [item.name for item in context.results.items if item.scope is not None and item.reason is None]

    def look(module: nn.Module, path: str, context: Context) -> CachedAttention | Refusal | None:
        if any(path.startswith(f"{name}.") for name in fused):
            return None
        return _match_cached_attention(module, path, context)

    def op_and_dtype(fused: CachedAttention, path: str) -> tuple[str, str]:
        return "attention", context.dtypes.names(path, fused)

    # Its own reason is not reported, only that of its layer.
    return fuse_each(context, STRUCTURE, look, op_and_dtype, expected=lambda root, path: False)


def fuse_cached_layers(context: Context) -> list[PlanItem]:
    """Fuse every layer of the model that has such attention. Call it after that is fused."""
    return fuse_mixer_layers(context, CachedAttention, Structure("cached layer"), lambda _: "attention")


def _match_cached_attention(
    module: nn.Module, path: str, context: Context
) -> CachedAttention | Refusal | None:
    possible = list(candidates(module))
    if not possible or isinstance(module, FusedModuleMixin) or not takes_cache(parameters_of(module.forward)):
        return None
    reason = refusal_to_fuse(module, path, context) or (PERMUTED if is_permuted(module) else None)
    if reason is not None:
        return Refusal(reason)
    return first_verified(module, [partial(_build_cached_attention, parts=parts) for parts in possible])


def _build_cached_attention(module: nn.Module, parts: CachedParts) -> CachedAttention:
    names = tuple(parameters_of(module.forward))
    fused: Any = fused_layer(CachedAttention, module, _parts=parts, _names=names, _projections=None)
    assert isinstance(fused, CachedAttention)
    return fused
