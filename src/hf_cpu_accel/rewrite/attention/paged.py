"""Attention of continuous batching: tokens of several sequences in one row, their keys in pages of transformers' cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.paged_attention import paged_attention


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    scaling: float | None,
    window: int | None,
    steps: dict[str, Any],
) -> Tensor:
    """Append the keys and values, and attend to all of each sequence.

    Args:
        query, key, value: [1, heads, tokens, features] of all sequences, one behind the other.
        cache: a `PagedAttentionCache`.
        steps: what transformers passes on for this step: cu_seq_lens_q, and by layer type or group cu_seq_lens_k, read_index and
            write_index (`PagedAttentionArgs`).

    Returns:
        [1, tokens, heads, features]
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    allocator = cache.layer_to_allocator[layer]
    query_begin, key_begin = steps["cu_seq_lens_q"], steps["cu_seq_lens_k"][allocator.layer_type]
    slots = steps["read_index"][allocator.index]
    if slots.numel() and allocator.supports_block_table:
        keys, values = (pages.flatten(0, 1) for pages in allocator.get_cache_for_block_table(layer))
        written = steps["write_index"][allocator.index]
        keys.index_copy_(0, written, key[0].transpose(0, 1))
        values.index_copy_(0, written, value[0].transpose(0, 1))
    else:
        # Prompts that find nothing in the cache attend to themselves; a window's ring loses what is to be read by what is
        # written, so transformers copies both out of it. Then all keys follow one another.
        key, value = cache.update(key, value, layer, dict(steps))
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        slots = torch.arange(len(keys), dtype=torch.int32)
    output = paged_attention(
        query[0].transpose(0, 1),
        keys,
        values,
        query_begin=query_begin,
        key_begin=key_begin,
        slots=slots.int(),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
    )
    return output[None]
