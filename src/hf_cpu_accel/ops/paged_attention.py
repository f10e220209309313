"""paged_attention: causal attention of several sequences, without padding, over keys in pages of a shared KV cache.

For continuous batching (Kwon et al. 2023, arXiv:2309.06180). Keys are read in place, without a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.kv_cache import features_of, from_storage, stored_width
from hf_cpu_accel.ops.registry import by_name, declare


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_begin: Tensor,
    key_begin: Tensor,
    slots: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Compute softmax(scale * query key^T) value for each sequence; its last query is at its last key.

    Args:
        query: [tokens, heads, D] float32 or bfloat16; sequence s has the rows query_begin[s] to query_begin[s + 1].
        key, value: [slots, kv_heads, D] and [slots, kv_heads, Dv], or the format of int8 caches (ops/kv_cache.py); heads is a
            multiple of kv_heads. Dense last dimensions.
        query_begin, key_begin: int32 [sequences + 1], ascending from 0 to the number of tokens, and to the length of `slots`.
        slots: int32 [all keys], the rows of `key` and `value` of the keys key_begin[s] to key_begin[s + 1] of sequence s.
        scale: factor of the scores.
        window: the number of keys that a query sees, including its own; None for all.

    Returns:
        [tokens, heads, Dv] contiguous, dtype of the query.

    Raises:
        ValueError: the shapes do not fit, or window < 1.
        RuntimeError: an index is out of range, or a sequence has more queries than keys.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)}: must be [tokens or slots, heads, features]"
            )
    heads, kv_heads = query.shape[1], key.shape[1]
    if key.shape[2] != stored_width(query.shape[2], key.dtype) or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"key of shape {tuple(key.shape)} and dtype {key.dtype} does not fit query of shape {tuple(query.shape)}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be at least 1, or None")
    return torch.ops.hf_cpu_accel.paged_attention(
        query, key, value, query_begin, key_begin, slots, window or 0, scale
    )


_SCHEMA = (
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor query_begin, Tensor key_begin, Tensor slots, int window, "
    "float scale) -> Tensor"
)


@by_name(_SCHEMA)
def paged_attention_reference(given: Any) -> Tensor:
    """Compute the op in PyTorch, sequence by sequence."""
    query, key, value = given.query, given.key, given.value
    tokens, heads, _ = query.shape
    output = query.new_empty(tokens, heads, features_of(value))
    ends = given.query_begin[1:].tolist(), given.key_begin[1:].tolist()
    first_query = first_key = 0
    for last_query, last_key in zip(*ends, strict=True):
        slots = given.slots[first_key:last_key].long()
        keys, values = (
            from_storage(states[slots], torch.float32)
            .transpose(0, 1)
            .repeat_interleave(heads // key.shape[1], dim=0)
            for states in (key, value)
        )
        scores = given.scale * query[first_query:last_query].transpose(0, 1).float() @ keys.transpose(1, 2)
        kv_len = last_key - first_key
        position = torch.arange(kv_len - (last_query - first_query), kv_len)[:, None]
        hidden = torch.arange(kv_len) > position
        if given.window:
            hidden |= torch.arange(kv_len) <= position - given.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        output[first_query:last_query] = (weights @ values).transpose(0, 1)
        first_query, first_key = last_query, last_key
    return output


declare(
    _SCHEMA,
    fake=lambda query, key, value, *_: query.new_empty((*query.shape[:2], features_of(value))),
    reference=paged_attention_reference,
)
