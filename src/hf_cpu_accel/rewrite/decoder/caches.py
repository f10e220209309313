"""Access of fused layers to caches. transformers, whose caches these are, is imported with the first one."""

from __future__ import annotations

from functools import cache as once
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Cache

    from hf_cpu_accel.generate.host_layers import KeyValueStorage


def storage_of(cache: Any, index: int, repeats: int) -> KeyValueStorage | None:
    """Return the storage of a cache layer; see `generate.host_layers.storage_of`."""
    return _host_layers().storage_of(cache, index, repeats)


def start_of(cache: Cache | None) -> Tensor | None:
    """Return int32 [batch], the position of each sequence's first token, if `cache` knows that they differ, or None.

    `CPUCache` does: the decode loop passes no mask. Loops of transformers pass one with every token.
    """
    start: Tensor | None = getattr(cache, "start", None)
    return start


def remember_start(cache: Cache | None, start: Tensor | None) -> None:
    """Store `start` for steps without a mask: only the decode loop has such steps, with a `CPUCache`."""
    from hf_cpu_accel.generate.cache import CPUCache

    if isinstance(cache, CPUCache) and not _are_equal(cache.start, start):
        cache.start = start


def cross_layer(cache: Any, index: int) -> Any:
    """Return the layer of an `EncoderDecoderCache` for the cross-attention of decoder layer `index`, or None if the op cannot
    use it."""
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
