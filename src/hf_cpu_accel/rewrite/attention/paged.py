"""Attention of continuous batching: tokens of several sequences in one row, their keys in pages of transformers' cache.

Before transformers 5.24 attention got the cache, to append keys and values. Since then layers call its `update`, which copies
all keys out of the pages. Fused layers get a `PagesInPlace` instead, so that their attention gets the cache again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.paged_attention import paged_attention


class PagesInPlace:
    """Replaces transformers' paged cache for a layer, and leaves keys and values to this package's attention.

    Args:
        pages: a `PagedAttentionCache`.
    """

    def __init__(self, pages: Any) -> None:
        self._pages = pages

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values like the cache, without storing them: `kwargs`, which go to attention, get the cache."""
        kwargs["cache"] = self._pages
        return key, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pages, name)


def in_place(cache: Any) -> Any:
    """Return `cache`, or a `PagesInPlace` for transformers' paged cache."""
    return PagesInPlace(cache) if hasattr(cache, "layer_to_allocator") else cache


def is_step(kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of a call of attention are those of a step of continuous batching (`PagedAttentionArgs`)."""
    return "write_index" in kwargs and "cu_seq_lens_q" in kwargs


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    steps: dict[str, Any],
) -> Tensor:
    """Append the keys and values, and attend to all of each sequence.

    Args:
        query, key, value: [1, heads, tokens, features] of all sequences, one after the other.
        steps: arguments of transformers for this step: sliding_window, cu_seq_lens_q, and by layer type or group cu_seq_lens_k,
            read_index and write_index (`PagedAttentionArgs`); and `cache`, a `PagedAttentionCache`. Without that the keys and
            values are those of whole sequences already, and cu_seq_lens_k is that of this layer.

    Returns:
        [1, tokens, heads, features]
    """
    cache, key_begin, slots = steps.get("cache"), steps["cu_seq_lens_k"], None
    if cache is not None:
        layer: int = module.layer_idx  # type: ignore[assignment]
        allocator = cache.layer_to_allocator[layer]
        key_begin = key_begin[allocator.layer_type]
        slots = steps["read_index"][allocator.index]
        if slots.numel() and allocator.supports_block_table:
            keys, values = (pages.flatten(0, 1) for pages in allocator.get_cache_for_block_table(layer))
            written = steps["write_index"][allocator.index]
            keys.index_copy_(0, written, key[0].transpose(0, 1))
            values.index_copy_(0, written, value[0].transpose(0, 1))
        else:
            # Prompts without cached tokens attend to themselves. Writing to the ring of a window overwrites keys that are still
            # read, so transformers copies both.
            key, value = cache.update(key, value, layer, dict(steps))
            slots = None
    if slots is None:  # all keys follow one another
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        slots = torch.arange(len(keys), dtype=torch.int32)
    output = paged_attention(
        query[0].transpose(0, 1),
        keys,
        values,
        query_begin=steps["cu_seq_lens_q"],
        key_begin=key_begin,
        slots=slots.int(),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=steps.get("sliding_window"),
    )
    return output[None]
