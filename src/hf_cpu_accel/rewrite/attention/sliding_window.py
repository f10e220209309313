"""Attention within a window around each token, and to and from a few global tokens (Longformer and LED; Beltagy et al. 2020,
arXiv:2004.05150, section 3.1): one op instead of chunks, whose scores hosts shift into diagonals and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.hosts.arguments import parameter_names
from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.packing.linear import QUANTIZED
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference, fused_layer
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import WEIGHT_DTYPES, Context
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each, refusal_to_fuse
from hf_cpu_accel.rewrite.core.packed_module import PackedModule, check_inference
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.runtime.tracing import is_tracing
from hf_cpu_accel.tolerance import ENCODER_LAYER, FEW_ROWS

STRUCTURE = "sliding-window attention"

_LOCAL, _GLOBAL = ("query", "key", "value"), ("query_global", "key_global", "value_global")
_WINDOW = "one_sided_attn_window_size"
_NUMBERS = ("num_heads", "head_dim", _WINDOW)
_MASKS = ("attention_mask", "is_index_masked", "is_index_global_attn")
_ARGUMENTS = ("hidden_states", *_MASKS, "is_global_attn")
_WEIGHTS = "output_attentions"


@dataclass(frozen=True)
class _GlobalTokens:
    """The global tokens of a batch.

    Attributes:
        places: int64 [B, G], the positions of the global tokens of each text.
        exist: bool [B, G]; a text may have fewer than another.
    """

    places: Tensor
    exist: Tensor

    @classmethod
    def of(cls, is_global: Tensor) -> _GlobalTokens:
        """Return the global tokens.

        Args:
            is_global: bool [B, L].
        """
        counts = is_global.sum(dim=1)
        most = int(counts.max())
        places = is_global.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
        return cls(places, torch.arange(most) < counts[:, None])

    def of_them(self, states: Tensor) -> Tensor:
        """Return [B, G, N] of [B, L, N]."""
        return states[torch.arange(len(states))[:, None], self.places]


class FusedSlidingWindowAttention(FusedModuleMixin):
    """Mixed into the host's class. hidden_states [B, L, D], float masks [B, L] (0: in the window, negative: padding, positive:
    global), the same as two bool masks [B, L], and whether there are global tokens -> ([B, L, D],)."""

    _followed = _NUMBERS

    num_heads: int
    head_dim: int
    one_sided_attn_window_size: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = self._supported_arguments(args, kwargs)
        if given is None:
            return self._original_class.forward(self, *args, **kwargs)
        states, *masks, has_global = given
        check_inference(self, states)
        return (self._attended(states, *masks, has_global=has_global),)

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        return Reference(args, kwargs) if self._supported_arguments(args, kwargs) is not None else None

    def _supported_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return the arguments in order, or None for a call that is not fused."""
        named = dict(zip((*_ARGUMENTS, _WEIGHTS), args, strict=False)) | kwargs
        if self.is_watched or is_tracing():
            return None
        if torch.is_autocast_enabled("cpu") or named.pop(_WEIGHTS, False) or set(named) != set(_ARGUMENTS):
            return None
        states, *masks, has_global = given = [named[name] for name in _ARGUMENTS]
        if not isinstance(states, Tensor) or states.dim() != 3 or states.dtype not in WEIGHT_DTYPES:
            return None
        fit = all(isinstance(mask, Tensor) and mask.shape == states.shape[:2] for mask in masks)
        fit = fit and masks[1].dtype is masks[2].dtype is torch.bool
        return given if fit and type(has_global) is bool and states.numel() else None

    def _attended(
        self, states: Tensor, mask: Tensor, is_padding: Tensor, is_global: Tensor, *, has_global: bool
    ) -> Tensor:
        states = ordinary(states)
        query, key, value = (self._heads(name, states) for name in _LOCAL)
        seen, count = mask == 0, 0
        if has_global:
            tokens = _GlobalTokens.of(is_global)
            key, value = (torch.cat([tokens.of_them(heads), heads], dim=1) for heads in (key, value))
            seen, count = torch.cat([tokens.exist, seen], dim=1), tokens.places.shape[1]
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        window = self.one_sided_attn_window_size
        context = attention(query, key, value, mask=seen, window=window, global_keys=count).flatten(2)
        context.masked_fill_(is_padding[..., None], 0.0)
        if has_global:
            query = self._heads(_GLOBAL[0], tokens.of_them(states)).transpose(1, 2)
            key, value = (self._heads(name, states).transpose(1, 2) for name in _GLOBAL[1:])
            of_all = attention(query, key, value, mask=is_padding.logical_not()).flatten(2)
            context[is_global] = of_all[tokens.exist]
        return context

    def _heads(self, name: str, states: Tensor) -> Tensor:
        """Return [B, L, heads, head_dim]."""
        projected: Tensor = ordinary(self._modules[name](states))  # type: ignore[misc]
        return projected.unflatten(-1, (self.num_heads, self.head_dim))


def fuse_sliding_windows(context: Context) -> list[PlanItem]:
    """Fuse all attention of this kind in the model. Call it after linears are packed."""
    return fuse_each(context, STRUCTURE, _match_sliding_window, lambda fused, path: ("attention", "float32"))


def _match_sliding_window(
    module: nn.Module, path: str, context: Context
) -> FusedSlidingWindowAttention | Refusal | None:
    """Return the fused module, or None if the module is of another kind."""
    if isinstance(module, FusedModuleMixin) or not set(module._modules).issuperset((*_LOCAL, *_GLOBAL)):
        return None
    if parameter_names(module.forward) != (*_ARGUMENTS, _WEIGHTS):
        return None
    if any(type(getattr(module, name, None)) is not int for name in _NUMBERS):
        return None
    reason = refusal_to_fuse(module, path, context)
    if reason is not None:
        return Refusal(reason)
    if not _computes_alike(module):
        return Refusal("it does not match sliding-window attention with global tokens")
    fused: FusedSlidingWindowAttention = fused_layer(FusedSlidingWindowAttention, module)
    return fused


def _computes_alike(module: nn.Module) -> bool:
    """Return whether the fused forward agrees with the own one, in a window of two tokens, with global tokens and without."""
    packed = {m.packed_dtype for m in module.modules() if isinstance(m, PackedModule)}
    few = 1.0 if packed.isdisjoint(QUANTIZED) else FEW_ROWS
    shadow = Shadow(module)
    tried: Any = shadow.module
    with torch.no_grad(), shadow.running():
        setattr(tried, _WINDOW, 2)
        fused = fused_layer(FusedSlidingWindowAttention, tried)
        features, batch, tokens = tried.num_heads * tried.head_dim, 2, 12
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        states = torch.randn(batch, tokens, features, generator=torch.Generator().manual_seed(0)).to(dtype)
        mask = torch.zeros(batch, tokens).to(dtype)
        mask[0, -3:], mask[1, (0, 7)], mask[0, 4] = -10000.0, 10000.0, 10000.0
        for given in (mask, mask.clamp_max(0.0)):
            masks = given, given < 0, given > 0
            has_global = bool(masks[2].any())
            expected = call_foreign(tried, states, *masks, has_global)
            ours = fused(states, *masks, has_global)
            if not compare(ours, expected).within(ENCODER_LAYER.of(dtype), few=few):
                return False
    return True
