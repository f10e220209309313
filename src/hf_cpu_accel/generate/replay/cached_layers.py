"""The cache layers that get tokens in every decode step: in storage that fused layers write, or by concatenation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)

from hf_cpu_accel.generate.cache_cross import CPUCrossCacheLayer
from hf_cpu_accel.generate.host_layers import KeyValueStorage, StoredTokens, storage_of, stored_tokens
from hf_cpu_accel.ops.kv_cache import features_of

_CONCATENATED = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer)


@dataclass(frozen=True)
class Layer:
    """A layer by its index, with the arguments of its storage, and whether beams share it."""

    index: int
    is_shared: bool
    repeats: int
    sizes: tuple[int, int, int, int]
    dtype: torch.dtype


@dataclass(frozen=True)
class Concatenated:
    """Keys and values of a layer of transformers, which concatenates them with those of new tokens."""

    keys: Tensor
    values: Tensor
    seen: int


class CachedLayers:
    """The layers of `cache`; of a cache with a part for the encoder's output, those of the other part."""

    def __init__(self, cache: Any) -> None:
        has_parts = type(cache) is EncoderDecoderCache
        self._cache: Any = cache.self_attention_cache if has_parts else cache
        self._encoders: Any = getattr(cache.cross_attention_cache, "layers", ()) if has_parts else ()

    def held(self) -> dict[int, StoredTokens]:
        """Return the tokens that fused layers wrote, by index."""
        layers = enumerate(getattr(self._cache, "layers", ()))
        return {index: held for index, layer in layers if (held := stored_tokens(layer)) is not None}

    def concatenated(self) -> dict[int, Concatenated]:
        """Return the keys and values of other layers, by index."""
        layers = enumerate(getattr(self._cache, "layers", ()))
        return {
            index: self.concatenated_at(index)
            for index, layer in layers
            if type(layer) in _CONCATENATED and layer.is_initialized and stored_tokens(layer) is None
        }

    def concatenated_at(self, index: int) -> Concatenated:
        layer = self._cache.layers[index]
        return Concatenated(layer.keys, layer.values, int(layer.get_seq_length()))

    def longest(self) -> int:
        """Return the largest number of tokens that a layer has seen; 0 if no layer counts."""
        held = [layer.seen for layer in self.held().values()]
        return max([*held, *(layer.seen for layer in self.concatenated().values())], default=0)

    def states(self) -> list[Any]:
        """Return the tensors that steps read and may write but do not replace: recurrent states, and keys and values of the
        encoder's output."""
        found: list[Any] = []
        for layer in (*getattr(self._cache, "layers", ()), *self._encoders):
            for name in ("conv_states", "recurrent_states"):
                states = getattr(layer, name, ())
                found += states.values() if isinstance(states, dict) else states
        for layer in self._encoders:
            ours = isinstance(layer, CPUCrossCacheLayer)  # whose keys and values are views, new each time
            names = ("key_storage", "value_storage") if ours else ("keys", "values")
            found += [getattr(layer, name, None) for name in names]
        return found

    def put(self, index: int, keys: Tensor, values: Tensor, new_tokens: int) -> None:
        """Set the contents of a layer by concatenation after a step with so many tokens."""
        layer = self._cache.layers[index]
        layer.keys, layer.values = keys, values
        if type(layer) is DynamicSlidingWindowLayer:
            layer.cumulative_length += new_tokens

    def layer(self, index: int, held: StoredTokens) -> Layer:
        """Return the layer with these stored tokens."""
        keys, repeats = held.key_storage, getattr(self._cache.layers[index], "repeats", 1)
        sizes = (keys.shape[0], keys.shape[1], features_of(keys), features_of(held.value_storage))
        return Layer(index, held.rows is not None, repeats, sizes, held.dtype)

    def encoder_sequences(self) -> dict[int, Tensor]:
        """Return the rows of the encoder's output that the sequences of the batch read, by index."""
        return {
            index: layer.encoder_sequences
            for index, layer in enumerate(self._encoders)
            if isinstance(layer, CPUCrossCacheLayer) and layer.encoder_sequences is not None
        }

    def reserve(self, layers: Iterable[Layer], seen: int, new_tokens: int) -> list[KeyValueStorage] | None:
        """Return storages with room for new tokens, or None if one of them does not continue a text of `seen` tokens."""
        stores = []
        for layer in layers:
            store = storage_of(self._cache, layer.index, layer.repeats)
            if store is None or (store.rows is not None) is not layer.is_shared:
                return None
            store.reserve(*layer.sizes, layer.dtype, new_tokens)
            if store.dropped + store.length != seen:
                return None
            stores.append(store)
        return stores
