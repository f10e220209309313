"""Cache layers of transformers as storage that a fused layer writes: those that `model(**inputs)` creates or gets.

A fused layer writes where transformers expects keys and values, so that code of transformers can continue from it and the other
way around.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
)

from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.generate.cache_layer import CPUCacheLayer, bucket, of_another_model, outside_inference_mode

__all__ = ["KeyValueStorage", "StoredTokens", "layer_of", "storage_of", "stored_tokens"]


class KeyValueStorage(Protocol):
    """Storage where a fused layer writes keys and values; see `CPUCacheLayer`, which has the same attributes."""

    @property
    def key_storage(self) -> Tensor | None: ...

    @property
    def value_storage(self) -> Tensor | None: ...

    @property
    def length(self) -> int: ...

    @property
    def dropped(self) -> int: ...

    @property
    def rows(self) -> Tensor | None: ...

    def reserve(
        self, batch: int, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, new_tokens: int
    ) -> None: ...

    def advance(self, new_tokens: int) -> None: ...

    def latest(self, count: int) -> tuple[Tensor, Tensor]: ...


def layer_of(cache: Any, index: int) -> Any:
    """Return layer `index` of a cache of a known class, which may create its layers on demand, or None."""
    if isinstance(cache, CPUCache):
        return cache.layers[index] if index < len(cache.layers) else None
    if type(cache) not in (DynamicCache, StaticCache) or cache.offloading:
        return None
    if index >= len(cache.layers) and cache.layer_class_to_replicate is not DynamicLayer:
        return None
    while index >= len(cache.layers):
        cache.layers.append(DynamicLayer())
    return cache.layers[index]


def storage_of(cache: Any, index: int, repeats: int = 1) -> KeyValueStorage | None:
    """Return the storage for keys and values of a fused layer in layer `index` of `cache`, or None if it cannot write there.

    Args:
        repeats: how often the layer passes each head to a cache; one of each is stored, which layers of transformers do not do.
    """
    layer = layer_of(cache, index)
    if isinstance(layer, CPUCacheLayer):
        if not layer.length:
            layer.repeats = repeats
        return layer if layer.repeats == repeats else None
    if repeats != 1:
        return None
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return _DynamicStorage(layer)
    return _StaticStorage(layer) if type(layer) is StaticLayer else None


@dataclass(frozen=True)
class StoredTokens:
    """The tokens `dropped` to `seen` of each sequence that a fused layer wrote, from the front of the storage on.

    Attributes:
        dtype: of the keys and values, which may be stored in another.
        rows: see `CPUCacheLayer.rows`.
    """

    key_storage: Tensor
    value_storage: Tensor
    dtype: torch.dtype
    dropped: int
    seen: int
    rows: Tensor | None = None


def stored_tokens(layer: Any) -> StoredTokens | None:
    """Return the contents of the storage of a cache layer, or None if fused layers do not write it or other code wrote since."""
    if isinstance(layer, CPUCacheLayer):
        keys, values, dtype = layer.key_storage, layer.value_storage, layer.dtype
        if keys is None or values is None or dtype is None:
            return None
        return StoredTokens(keys, values, dtype, layer.dropped, layer.dropped + layer.length, layer.rows)
    room = _rooms.get(layer) if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else None
    if room is None or room.keys is not layer.keys or room.values is not layer.values:
        return None
    seen = int(layer.get_seq_length())
    return StoredTokens(room.key_storage, room.value_storage, room.keys.dtype, seen - room.end, seen)


@dataclass(frozen=True)
class _Room:
    """A storage with the tokens `first` to `end` of a layer as its `keys` and `values`, and free space after them."""

    key_storage: Tensor
    value_storage: Tensor
    keys: Tensor
    values: Tensor
    first: int
    end: int


# Outside of the layers: a copy of a layer has the same tensors, and only one of the two may write after them.
_rooms: WeakKeyDictionary[CacheLayerMixin, _Room] = WeakKeyDictionary()


class _DynamicStorage:
    """Storage of `DynamicLayer` and `DynamicSlidingWindowLayer`, which copy all tokens for each new one.

    Here they hold views of a storage with free space. If they hold other tensors (cropped, reordered or from other code), those
    are copied once.
    """

    key_storage: Tensor | None = None
    value_storage: Tensor | None = None
    rows = None
    length = dropped = 0

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.first = 0

    def reserve(
        self, batch: int, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, new_tokens: int
    ) -> None:
        layer = self.layer
        seen = int(layer.get_seq_length())
        held = layer.keys is not None and layer.keys.numel() > 0
        past = layer.keys.shape[2] if held else 0
        room = _rooms.get(layer)
        asked = (batch, kv_heads, key_dim, value_dim)
        if held and (*layer.keys.shape[:2], layer.keys.shape[3], layer.values.shape[3]) != asked:
            raise of_another_model((*layer.keys.shape[:2], layer.keys.shape[3]), asked[:3])
        if (
            room is not None
            and room.keys is layer.keys
            and room.values is layer.values
            and room.end + new_tokens <= room.key_storage.shape[2]
            and room.key_storage.dtype is dtype
        ):
            self.key_storage, self.value_storage = room.key_storage, room.value_storage
            self.first, self.length = room.first, room.end
        else:
            # Most calls with an empty cache are single calls, which score or embed a text.
            capacity = bucket(past + new_tokens) if past else new_tokens
            with outside_inference_mode():
                self.key_storage = torch.zeros(batch, kv_heads, capacity, key_dim, dtype=dtype)
                self.value_storage = torch.zeros(batch, kv_heads, capacity, value_dim, dtype=dtype)
            if held:
                self.key_storage[:, :, :past] = layer.keys
                self.value_storage[:, :, :past] = layer.values
            self.first, self.length = 0, past
        self.dropped = seen - self.length

    def advance(self, new_tokens: int) -> None:
        layer, keys, values = self.layer, self.key_storage, self.value_storage
        assert keys is not None
        assert values is not None
        self.length += new_tokens
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        if type(layer) is DynamicSlidingWindowLayer:
            layer.cumulative_length += new_tokens
            if not layer.record_past:
                self.first = max(self.first, self.length - layer.sliding_window + 1)
        layer.keys, layer.values = (
            keys[:, :, self.first : self.length],
            values[:, :, self.first : self.length],
        )
        _rooms[layer] = _Room(keys, values, layer.keys, layer.values, self.first, self.length)

    def latest(self, count: int) -> tuple[Tensor, Tensor]:
        keys, values = self.key_storage, self.value_storage
        assert keys is not None
        assert values is not None
        return keys[:, :, self.length - count : self.length], values[:, :, self.length - count : self.length]


class _StaticStorage:
    """`StaticLayer`, whose tensors already are a storage."""

    rows = None
    dropped = 0

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @property
    def key_storage(self) -> Any:
        return self.layer.keys

    @property
    def value_storage(self) -> Any:
        return self.layer.values

    @property
    def length(self) -> int:
        return int(self.layer.get_seq_length())

    def reserve(
        self, batch: int, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, new_tokens: int
    ) -> None:
        layer = self.layer
        if not layer.is_initialized:
            shape = (batch, kv_heads, 1)
            layer.lazy_initialization(
                torch.empty(*shape, key_dim, dtype=dtype), torch.empty(*shape, value_dim, dtype=dtype)
            )
        if (*layer.keys.shape[:2], layer.keys.shape[3]) != (batch, kv_heads, key_dim):
            raise of_another_model((*layer.keys.shape[:2], layer.keys.shape[3]), (batch, kv_heads, key_dim))
        if self.length + new_tokens > layer.max_cache_len:
            raise ValueError(
                f"past_key_values: {self.length} tokens and {new_tokens} new ones do not fit into a cache with "
                f"max_cache_len={layer.max_cache_len}: pass a longer cache, or a DynamicCache"
            )

    def advance(self, new_tokens: int) -> None:
        self.layer.cumulative_length.add_(new_tokens)

    def latest(self, count: int) -> tuple[Tensor, Tensor]:
        return self.layer.keys, self.layer.values  # all positions, as in its masks
