"""Attention of this package behind the attention interface of transformers, under the name `hf_cpu_accel`; masks.py has the
masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.hosts.arguments import NATIVE_ATTENTION
from hf_cpu_accel.lazy.causal_mask import CausalMask
from hf_cpu_accel.lazy.lazy_tensor import settled
from hf_cpu_accel.lazy.stored_heads import readable
from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.ops.derivatives import wants_derivative
from hf_cpu_accel.rewrite.attention.masks import as_key_padding, attention_mask
from hf_cpu_accel.rewrite.attention.paged import is_step, paged_attention_forward
from hf_cpu_accel.rewrite.core.recordable import recordable

# Keyword arguments that change the result and that the op does not support.
_UNSUPPORTED = ("softcap", "s_aux", "cache", "head_mask", "output_attentions")


def register() -> None:
    """Register the name with transformers. It has no effect on models whose config does not use it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NATIVE_ATTENTION, attention_forward)
    AttentionMaskInterface.register(NATIVE_ATTENTION, attention_mask)


@recordable
def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' `sdpa_attention_forward`, which serves all calls that the op does
    not support.

    Args:
        query, key, value: [B, H, L, D]; fewer key and value heads than query heads are grouped.
        attention_mask: None, or bool (True = attend) or float (added), broadcastable to [B, H, Lq, Lk].
        position_bias: [1 or B, H, Lq, Lk], added to the scores (T5).

    Returns:
        [B, Lq, H, D] and None, since attention weights are never computed.
    """
    if is_step(kwargs):  # continuous batching: the lengths determine the mask
        return paged_attention_forward(module, query, key, value, scaling, kwargs), None
    if dropout or _wants_more(query, key, value, kwargs):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias, **kwargs
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    if causal and key.shape[2] > query.shape[2]:
        # Prefill of a static cache: the queries are at its start, the keys behind them are empty slots.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        position_bias = None if position_bias is None else position_bias[..., : query.shape[2]]
    mask = attention_mask = settled(attention_mask)
    if isinstance(mask, CausalMask) and position_bias is None and not mask.hides_by_window:
        mask, causal = mask.key_padding(), True
    elif position_bias is not None:
        mask, causal = _with_bias(position_bias, attention_mask, causal), False
    elif mask is not None and mask.dtype is torch.bool:
        mask = as_key_padding(mask, query.shape[0])
    if mask is not None and mask.is_floating_point() and mask.dtype is not query.dtype:
        mask = mask.to(query.dtype)
    return attention(query, readable(key), readable(value), mask=mask, is_causal=causal, scale=scaling), None


def _wants_more(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> bool:
    """Return whether the call needs more than the op supports: gradients, other dtypes, broadcast batches, extras."""
    if query.dtype not in (torch.float32, torch.bfloat16) or query.shape[0] != key.shape[0]:
        return True
    if wants_derivative(query, key, value):
        return True
    # Present but None or False means not asked for; a mask tensor must not be tested for truth.
    return any(kwargs.get(name) is not None and kwargs[name] is not False for name in _UNSUPPORTED)


def _with_bias(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return one additive mask from a position bias and the other masks."""
    lowest = torch.finfo(bias.dtype).min
    if mask is None and causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool).tril()
    if mask is None:
        return bias
    if mask.dtype is torch.bool:
        return torch.where(mask, bias, lowest)
    return bias + mask
