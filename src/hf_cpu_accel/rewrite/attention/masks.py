"""Masks behind the mask interface of transformers: causality, windows and padding as objects, whose tensors are created only
when read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_cpu_accel.lazy.causal_mask import causal_mask, is_sliding_causal, plain_causal
from hf_cpu_accel.lazy.window_mask import WindowMask, is_window
from hf_cpu_accel.runtime.tracing import is_tracing

_PADDING = "_hf_cpu_accel_padding"  # attribute of a mask: the padding that it was made from


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
    """Return the mask of transformers' `sdpa_mask`, except that tensors for causality, a window and padding are created only
    when read.

    Padding alone is a view of the padding mask; see `CausalMask` for the masks of decoders, `WindowMask` for those of encoders.

    Args:
        attention_mask: bool [batch_size, number of tokens], True where there is a token, or None.

    Returns:
        bool [batch_size, 1, q_length, kv_length], True where to attend, or None if `is_causal` covers the whole mask.
    """
    only_padding = (
        allow_is_bidirectional_skip
        and not allow_is_causal_skip
        and not use_vmap
        and (local_size is None or kv_length < local_size)
        and (attention_mask is None or attention_mask.dim() == 2)
    )
    if only_padding:
        tracing = is_tracing()
        if attention_mask is None or (not tracing and attention_mask.all()):
            return None
        missing = kv_offset + kv_length - attention_mask.shape[-1]
        # Always a copy: the caller may overwrite it before the last layer has run.
        padding = nn.functional.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask.clone()
        padding = padding[:, kv_offset : kv_offset + kv_length]
        mask = padding[:, None, None, :].expand(batch_size, 1, q_length, kv_length)
        if q_length == kv_length and kv_offset == 0:
            setattr(mask, _PADDING, padding)
        return mask

    tracing = is_tracing()
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


def batch_padding(mask: Tensor) -> Tensor | None:
    """Return bool [B, L], False at padding, if `mask` was created here from the padding of the batch alone, or None.

    A mask of other origin never counts, even if its values are equal: keys that are hidden from all may still be queries.
    """
    padding: Tensor | None = getattr(mask, _PADDING, None)
    return padding


def as_key_padding(mask: Tensor, batch_size: int) -> Tensor:
    """Return [B, Lk] if `mask` [B, 1, Lq, Lk] is equal for all queries, so that padded keys are skipped, else `mask`."""
    if mask.dim() != 4:
        return mask
    same_for_heads = mask.shape[1] == 1 or mask.stride(1) == 0
    same_for_queries = mask.shape[2] == 1 or mask.stride(2) == 0
    if same_for_heads and same_for_queries:
        return mask[:, 0, 0].expand(batch_size, -1)
    return mask


def _is_causal(mask_function: Callable[..., Any] | None, window: int | None) -> bool:
    """Return whether the function is causality, within the window if there is one, and nothing else."""
    if window is None:
        return mask_function is plain_causal()
    return mask_function is not None and is_sliding_causal(mask_function, window)
