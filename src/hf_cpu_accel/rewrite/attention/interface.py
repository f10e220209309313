"""Our attention behind transformers' attention and mask interfaces, under the name `hf_cpu_accel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.hosts.arguments import NATIVE_ATTENTION
from hf_cpu_accel.lazy.causal_mask import CausalMask, causal_mask, is_sliding_causal, plain_causal
from hf_cpu_accel.lazy.lazy_tensor import settled
from hf_cpu_accel.lazy.stored_heads import readable
from hf_cpu_accel.lazy.window_mask import WindowMask, is_window
from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.rewrite.attention.paged import paged_attention_forward

# Keyword arguments that change the result and that the op does not know.
_PADDING = "_hf_cpu_accel_padding"  # attribute of a mask: the padding that it was made from
_UNSUPPORTED = ("softcap", "s_aux", "cache", "head_mask", "output_attentions")


def register() -> None:
    """Make the name known to transformers. It has no effect on models whose config does not use it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NATIVE_ATTENTION, attention_forward)
    AttentionMaskInterface.register(NATIVE_ATTENTION, attention_mask)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' `sdpa_mask`, except that causality, a window and padding are made only where they are read.

    Padding alone is a view of the padding mask; see `CausalMask` for the masks of decoders, `WindowMask` for those of encoders.

    Args:
        attention_mask: bool [batch_size, number of tokens], True where there is a token, or None.

    Returns:
        bool [batch_size, 1, q_length, kv_length], True where to attend, or None if there is nothing to mask beyond what
        `is_causal` says.
    """
    only_padding = (
        allow_is_bidirectional_skip
        and not allow_is_causal_skip
        and not use_vmap
        and (local_size is None or kv_length < local_size)
        and (attention_mask is None or attention_mask.dim() == 2)
    )
    if only_padding:
        tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if attention_mask is None or (not tracing and attention_mask.all()):
            return None
        missing = kv_offset + kv_length - attention_mask.shape[-1]
        # A copy in any case: it may be the caller's own, who may write to it before the last layer has run.
        padding = nn.functional.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask.clone()
        padding = padding[:, kv_offset : kv_offset + kv_length]
        mask = padding[:, None, None, :].expand(batch_size, 1, q_length, kv_length)
        if q_length == kv_length and kv_offset == 0:
            setattr(mask, _PADDING, padding)
        return mask

    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if (
        allow_is_bidirectional_skip
        and local_size is not None
        and not (use_vmap or allow_is_causal_skip or tracing)
        and q_length == kv_length
        and q_offset == kv_offset == 0
        and (attention_mask is None or attention_mask.shape == (batch_size, kv_length))
        and is_window(mask_function, local_size)
    ):
        hides = attention_mask is not None and not attention_mask.all()
        return WindowMask.of(batch_size, kv_length, local_size, attention_mask if hides else None)
    if (
        allow_is_causal_skip
        and not (use_vmap or allow_is_bidirectional_skip or tracing)
        and isinstance(q_offset, int)
        and q_offset + q_length == kv_offset + kv_length
        and (attention_mask is None or attention_mask.shape == (batch_size, kv_offset + kv_length))
        and _is_causal(mask_function, local_size)
    ):
        return causal_mask(batch_size, q_length, kv_length, q_offset, kv_offset, local_size, attention_mask)

    from transformers.masking_utils import sdpa_mask

    if mask_function is not None:
        kwargs["mask_function"] = mask_function
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        use_vmap=use_vmap,
        **kwargs,
    )


def _is_causal(mask_function: Callable[..., Any] | None, window: int | None) -> bool:
    """Whether that is causality, within the window if there is one, and nothing else."""
    if window is None:
        return mask_function is plain_causal()
    return mask_function is not None and is_sliding_causal(mask_function, window)


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
    """The signature of transformers' `sdpa_attention_forward`, which also serves whatever our op does not.

    Args:
        query, key, value: [B, H, L, D]; fewer key and value heads than query heads are grouped.
        attention_mask: None, or bool (True = attend) or float (added), broadcastable to [B, H, Lq, Lk].
        position_bias: [1 or B, H, Lq, Lk], added to the scores (T5).

    Returns:
        [B, Lq, H, D] and None, since attention weights are never made.
    """
    pages = kwargs.get("cache")
    if (
        pages is not None and "cu_seq_lens_q" in kwargs
    ):  # continuous batching: what to attend to follows from the lengths
        window = kwargs.get("sliding_window")
        output = paged_attention_forward(module, query, key, value, pages, scaling, window, kwargs)
        return output, None
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
    """Whether something is asked for that the op does not do: gradients, other dtypes, broadcast batches, extras."""
    if query.dtype not in (torch.float32, torch.bfloat16) or query.shape[0] != key.shape[0]:
        return True
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return True
    # Present but None or False means not asked for; a mask tensor must not be tested for truth.
    return any(kwargs.get(name) is not None and kwargs[name] is not False for name in _UNSUPPORTED)


def as_key_padding(mask: Tensor, batch_size: int) -> Tensor:
    """[B, Lk] where `mask` [B, 1, Lq, Lk] says the same for all queries, so that padded keys are skipped."""
    if mask.dim() != 4:
        return mask
    same_for_heads = mask.shape[1] == 1 or mask.stride(1) == 0
    same_for_queries = mask.shape[2] == 1 or mask.stride(2) == 0
    if same_for_heads and same_for_queries:
        return mask[:, 0, 0].expand(batch_size, -1)
    return mask


def padding_of(mask: Tensor) -> Tensor | None:
    """bool [B, L] if `mask` was made here from nothing but the padding of the batch: False stands for no token.

    A mask of other origin never counts, even if it looks the same: keys that are hidden from all may still ask.
    """
    padding: Tensor | None = getattr(mask, _PADDING, None)
    return padding


def _with_bias(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """One additive mask from a position bias and what else may not be attended to."""
    lowest = torch.finfo(bias.dtype).min
    if mask is None and causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool).tril()
    if mask is None:
        return bias
    if mask.dtype is torch.bool:
        return torch.where(mask, bias, lowest)
    return bias + mask
