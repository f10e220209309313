"""Find latent attention in a model, verify it, and fuse it and its layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from hf_cpu_accel.guard.modules import instance_forward
from hf_cpu_accel.hosts.arguments import parameters_of, takes_cache
from hf_cpu_accel.patching.fused_module import fused_layer
from hf_cpu_accel.plan import PlanItem, Structure
from hf_cpu_accel.rewrite.core.context import Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.latent.attention import LatentAttention
from hf_cpu_accel.rewrite.latent.parts import LatentParts, candidates
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.mixer.match import fuse_mixer_layers
from hf_cpu_accel.rewrite.mixer.verify import first_verified

STRUCTURE = Structure("latent attention", "block")


def fuse_latent_attention(context: Context) -> list[PlanItem]:
    """Fuse all latent attention of the model. Call it after linears are packed."""

    def op_and_dtype(fused: LatentAttention, path: str) -> tuple[str, str]:
        return "attention", context.dtypes.names(path, fused)

    return fuse_each(context, STRUCTURE, _match_latent_attention, op_and_dtype)


def fuse_latent_layers(context: Context) -> list[PlanItem]:
    """Fuse every layer of the model that has such attention. Call it after that is fused."""
    return fuse_mixer_layers(context, LatentAttention, Structure("latent layer"), lambda _: "attention")


def _match_latent_attention(
    module: nn.Module, path: str, context: Context
) -> LatentAttention | Refusal | None:
    possible = candidates(module)
    if not possible or isinstance(module, LatentAttention):
        return None
    reason = refusal_to_swap(module, path, context) or _unsupported_reason(module)
    if reason is not None:
        return Refusal(reason)
    return first_verified(module, [partial(_build_latent_attention, parts=parts) for parts in possible])


def _unsupported_reason(module: Any) -> str | None:
    """Return the reason for the column "left because", or None."""
    if any(instance_forward(part) is not None for part in module.modules()):
        return "a module in it has a replaced forward"
    if not takes_cache(parameters_of(module.forward)):
        return "it does not take the cache of transformers as past_key_values"
    for name in ("kv_b_proj", "o_proj"):
        if not isinstance(module._modules[name], PackedLinear):
            return f"{name} is not packed"
    if module.kv_b_proj.bias is not None or module.kv_b_proj.transposed:
        return "its keys are not a product of its latents alone"
    return None


def _build_latent_attention(module: nn.Module, parts: LatentParts) -> LatentAttention:
    names = tuple(parameters_of(module.forward))
    fused: LatentAttention = fused_layer(
        LatentAttention, module, _parts=parts, _names=names, _absorbed=None, _projections=None
    )
    return fused
