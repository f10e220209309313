"""attention: softmax(scale * query key^T + mask) value, without a score matrix in memory.

Flash attention (Dao et al. 2022, arXiv:2205.14135) reads blocks of keys and updates a running maximum and sum per query row.
Scores, softmax and sums are float32 for every input dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_cpu_accel.ops.derivatives import refuse_derivatives
from hf_cpu_accel.ops.kv_cache import features_of, from_storage, stored_width
from hf_cpu_accel.ops.registry import declare


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    global_keys: int = 0,
) -> Tensor:
    """Compute softmax(scale * query key^T + mask) value, with the softmax over the keys.

    Args:
        query: [B, Hq, Lq, D] float32 or bfloat16, any strides: a transposed view of [B, Lq, Hq * D] is not copied. Only a last
            dimension that is not dense is copied. The same holds for key and value.
        key: [B, Hkv, Lk, D]; Hq is a multiple of Hkv, query head h uses key head h // (Hq // Hkv).
        value: [B, Hkv, Lk, Dv]. Key and value may be int8 with four more columns, the format of int8 caches (ops/kv_cache.py).
        mask: None; bool [B, Lk], key padding, True = attend (padding before and after the text is skipped, not computed); or
            bool or floating (added to the scores), broadcastable to [B, Hq, Lq, Lk].
        is_causal: query i sees the keys <= i + Lk - Lq, aligned to the end of the keys as in transformers.
        scale: factor of the scores, default 1 / sqrt(D).
        softcap: replace scores by softcap * tanh(score / softcap) before the mask is added (Gemma 2, arXiv:2408.00118), or None.
        window: query i sees keys at a distance of at most `window` from key i + Lk - Lq; None for all keys.
        global_keys: the number of first keys that every query sees beyond its window; requires a window and is_causal=False
            (Longformer, Beltagy et al. 2020, arXiv:2004.05150).

    Returns:
        [B, Lq, Hq, Dv] contiguous, dtype of the query: ready to be reshaped to [B, Lq, Hq * Dv]. Rows without any key are 0.

    Raises:
        ValueError: shapes that do not fit, softcap <= 0, window < 0, or more global_keys than keys.
        TypeError: the mask is neither bool nor floating.
        RuntimeError: a derivative with respect to an input is computed.
    """
    _check_heads(query, key, value)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap}: must be positive, or None")
    if window is not None and window < 0:
        raise ValueError(f"window={window}: must be 0 or more, or None")
    if not 0 <= global_keys <= key.shape[2] or (global_keys and (window is None or is_causal)):
        raise ValueError(
            f"global_keys={global_keys}: must be 0 to {key.shape[2]}, the number of keys, "
            "and 0 if there is no window or is_causal=True"
        )
    if mask is not None:
        mask = _normal_mask(mask, query, key)
    refuse_derivatives("attention", query, key, value, mask)
    return torch.ops.hf_cpu_accel.attention(
        query, key, value, mask, is_causal, scale, softcap, window, global_keys
    )


def _check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)}: must be [batch, heads, length, head_dim]; "
                "split the heads first, x.unflatten(-1, (heads, -1)).transpose(1, 2)"
            )
    batch, heads, _, head_dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    key_width = stored_width(head_dim, key.dtype)
    if key.shape[0] != batch or key.shape[3] != key_width:
        raise ValueError(
            f"key of shape {tuple(key.shape)}: must be [{batch}, heads, length, {key_width}], "
            f"as the query is {tuple(query.shape)}"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value of shape {tuple(value.shape)}: must be [{batch}, {kv_heads}, {kv_len}, any], as the key is {tuple(key.shape)}"
        )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads != 0):
        raise ValueError(f"query with {heads} heads: must be a multiple of the key's {kv_heads} heads")
    if head_dim == 0:
        raise ValueError(f"query of shape {tuple(query.shape)}: head_dim must be at least 1")


def _normal_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask as a view in one of the forms that the op accepts: bool [B, Lk] or [B | 1, Hq | 1, Lq | 1, Lk]."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"mask of dtype {mask.dtype}: must be bool (True = attend) or floating (added); "
            "convert a 0/1 attention_mask with mask.bool()"
        )
    batch, heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    if mask.dtype == torch.bool and mask.dim() == 2:
        if mask.shape[0] != batch or mask.shape[1] != kv_len:
            raise ValueError(
                f"mask of shape {tuple(mask.shape)}: two boolean dimensions are key padding, [{batch}, {kv_len}]; "
                "for [q_len, kv_len] pass mask[None, None]"
            )
        return mask
    wanted = (batch, heads, q_len, kv_len)
    if mask.dim() > 4 or any(
        size not in (1, full) for size, full in zip(mask.shape[::-1], wanted[::-1], strict=False)
    ):
        raise ValueError(f"mask of shape {tuple(mask.shape)}: must be broadcastable to {wanted}")
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype not in (torch.bool, torch.float32, torch.bfloat16):
        mask = mask.float()
    if mask.dtype == torch.bool and mask.shape[1] == 1 and mask.shape[2] == 1:
        return mask[:, 0, 0].expand(batch, kv_len)
    return mask.expand(-1, -1, -1, kv_len)


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    softcap: float | None = None,
    window: int | None = None,
    global_keys: int = 0,
) -> Tensor:
    """Compute the op in PyTorch, in float64 for float64 inputs, else in float32."""
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query.shape[1] // key.shape[1] if key.shape[1] else 1
    k, v = (from_storage(x, precision).repeat_interleave(group, dim=1) for x in (key, value))
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query.to(precision) * factor) @ k.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    q_len, kv_len = scores.shape[-2:]
    if mask is not None and mask.dtype == torch.bool:
        allowed = mask[:, None, None] if mask.dim() == 2 else mask
        scores = scores.masked_fill(~allowed, -math.inf)
        if mask.dim() == 2:
            v = v.masked_fill(~mask[:, None, :, None], 0.0)  # 0 * NaN: padding must not reach the output
    elif mask is not None:
        scores = scores + mask.to(precision)
    ahead = torch.arange(kv_len) - (torch.arange(q_len) + (kv_len - q_len))[:, None]  # of the query
    hidden = ahead > 0 if is_causal else torch.zeros_like(ahead, dtype=torch.bool)
    if window is not None:
        hidden |= (ahead.abs() > window) & (torch.arange(kv_len) >= global_keys)
    scores = scores.masked_fill(hidden, -math.inf)
    nothing = (scores == -math.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(scores, dim=-1).masked_fill(nothing, 0.0)
    return (weights @ v).transpose(1, 2).to(query.dtype).contiguous()


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], features_of(value)))


declare(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale, float? softcap=None, "
    "int? window=None, int global_keys=0) -> Tensor",
    fake=_fake,
    reference=attention_reference,
)
