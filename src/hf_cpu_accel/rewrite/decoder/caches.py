"""What fused layers ask of a cache. transformers, which caches are from, is imported with the first one."""

from __future__ import annotations

from functools import cache as once
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Cache

    from hf_cpu_accel.generate.host_layers import KeyValueStorage


def storage_of(cache: Any, index: int, repeats: int) -> KeyValueStorage | None:
    """See `generate.host_layers.storage_of`."""
    return _host_layers().storage_of(cache, index, repeats)


def start_of(cache: Cache | None) -> Tensor | None:
    """int32 [batch], the position of each sequence's first token where `cache` knows that they differ.

    One of ours does: the decode loop passes no mask. Stock loops pass one with every token.
    """
    start: Tensor | None = getattr(cache, "start", None)
    return start


def remember_start(cache: Cache | None, start: Tensor | None) -> None:
    """For steps that come without a mask: only the decode loop has such, and its cache is one of ours."""
    from hf_cpu_accel.generate.cache import CPUCache

    if isinstance(cache, CPUCache) and not _are_equal(cache.start, start):
        cache.start = start


def cross_layer(cache: Any, index: int) -> Any:
    """The layer of an `EncoderDecoderCache` that holds what decoder layer `index` looks at; None if the op cannot use it."""
    from transformers import EncoderDecoderCache
    from transformers.cache_utils import DynamicLayer

    from hf_cpu_accel.generate.cache import CPUCrossCacheLayer

    if type(cache) is not EncoderDecoderCache:
        return None
    layer = _host_layers().layer_of(cache.cross_attention_cache, index)
    return layer if isinstance(layer, CPUCrossCacheLayer) or type(layer) is DynamicLayer else None


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


@once
def _host_layers() -> Any:
    from hf_cpu_accel.generate import host_layers

    return host_layers
