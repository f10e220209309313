"""Finds latent attention in a model, verifies what it is, and fuses it and its layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.hosts.arguments import cache_argument, parameters_of
from hf_cpu_accel.patching.fused_module import fused_layer
from hf_cpu_accel.patching.hooks import own_forward
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.core.tolerance import DECODER_LAYER
from hf_cpu_accel.rewrite.core.verify import row_error
from hf_cpu_accel.rewrite.latent.attention import LatentAttention
from hf_cpu_accel.rewrite.latent.parts import LatentParts, candidates
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.mixer.match import fuse_mixer_layers
from hf_cpu_accel.rewrite.mixer.mixer import Example

STRUCTURE = "latent attention"

_BATCH, _TOKENS, _PADDING = 2, 9, 3


def fuse_latent_attention(context: Context) -> list[PlanItem]:
    """Fuse all latent attention of the model. To be called when the linears are packed."""

    def op_and_dtype(fused: LatentAttention, path: str) -> tuple[str, str]:
        return "attention", context.dtype_names(path, fused)

    return fuse_each(context, STRUCTURE, _looked_at, op_and_dtype)


def fuse_latent_layers(context: Context) -> list[PlanItem]:
    """Fuse every layer of the model that has such attention. To be called when that is fused."""
    return fuse_mixer_layers(context, LatentAttention, "latent layer", lambda _: "attention")


def _looked_at(module: nn.Module, path: str, context: Context) -> LatentAttention | Refusal | None:
    possible = candidates(module)
    if not possible or isinstance(module, LatentAttention):
        return None
    reason = refusal_to_swap(module, path, context) or _obstacle(module)
    if reason is not None:
        return Refusal(reason)
    output: Any = module._modules["o_proj"]
    allowed, refusal = DECODER_LAYER.of(output.weight_dtype), None
    for parts in possible:
        example = _fused(module, parts).example(_BATCH, _TOKENS, _PADDING)
        expected = _expected(module, example)
        if isinstance(expected, Refusal):
            refusal = refusal or expected
            continue
        example = _fused(module, parts).example(_BATCH, _TOKENS, _PADDING)
        if _error(module, parts, example, expected) <= allowed:
            return _fused(module, parts)
    return refusal or Refusal("it computes something else than latent attention: its parts run one by one")


def _obstacle(module: Any) -> str | None:
    """Why such attention is left, in words that go on after "left because"."""
    if any(own_forward(part) is not None for part in module.modules()):
        return "the forward of a module in it was replaced"
    if cache_argument(module.forward) != "cache":
        return "this version of its host hands it a cache of another kind"
    for name in ("kv_b_proj", "o_proj"):
        if not isinstance(module._modules[name], PackedLinear):
            return f"{name} is not packed"
    if module.kv_b_proj.bias is not None or module.kv_b_proj.transposed:
        return "its keys are no product of its latents alone"
    return None


def _fused(module: nn.Module, parts: LatentParts) -> LatentAttention:
    names = tuple(parameters_of(module.forward))
    fused: LatentAttention = fused_layer(
        LatentAttention, module, _parts=parts, _names=names, _absorbed=None, _projections=None
    )
    return fused


def _expected(module: nn.Module, example: Example) -> tuple[Tensor, ...] | Refusal:
    shadow = Shadow(module)
    with torch.no_grad(), shadow.running():
        outputs: tuple[Tensor, ...] | Refusal = call_foreign(_run, shadow.module, example)
    return outputs


def _error(module: nn.Module, parts: LatentParts, example: Example, expected: tuple[Tensor, ...]) -> float:
    shadow = Shadow(module)
    with torch.no_grad(), shadow.running():
        outputs = _run(_fused(shadow.module, parts), example)
    return max(row_error(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))


def _run(module: Any, example: Example) -> tuple[Tensor, ...]:
    """What it gives for a padded prompt, for the token after it and for that without a cache, and what the cache holds then."""
    output = module._modules["o_proj"]
    first = next(part for part in module.modules() if isinstance(part, PackedLinear))
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(_BATCH, _TOKENS + 1, first.in_features, generator=generator).to(output.weight_dtype)
    prompt = module(states[:, :_TOKENS], **example.prompt)[0]
    token = module(states[:, _TOKENS:], **example.token)[0]
    alone = module(states[:, _TOKENS:], **{**example.token, "cache": None, "attention_mask": None})[0]
    layer = example.token["cache"].layers[module.layer_idx]
    held = (layer.keys.flatten(0, 2), layer.values.flatten(0, 2))
    return prompt[example.tokens], token, alone, *held
