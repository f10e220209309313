"""`CPUCache`: the KV cache of transformers, in storage that is written in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from hf_cpu_accel.generate.beam_rows import BeamRows
from hf_cpu_accel.generate.cache_cross import CPUCrossCacheLayer
from hf_cpu_accel.generate.cache_layer import CPUCacheLayer
from hf_cpu_accel.generate.cache_sliding import CPUSlidingCacheLayer

__all__ = [
    "CPUCache",
    "CPUCacheLayer",
    "CPUCrossCache",
    "CPUCrossCacheLayer",
    "CPUSlidingCacheLayer",
    "cache_refusal",
]

STORAGE_DTYPES = (None, torch.float32, torch.bfloat16, torch.int8)


class CPUCache(DynamicCache):
    """The KV cache that `generate` of an accelerated model uses. It can be passed to `generate` again, copied and cropped.

    Args:
        config: of the model; layers are derived from it as in `DynamicCache`.
        dtype: of the storage: float32, bfloat16, int8 (per token and head, ops/kv_cache.py), or None for the dtype of the keys.

    Attributes:
        layers: a `CPUCacheLayer` per layer, or transformers' `DummyLayer` where there is nothing to store.
        start: int32 [batch], the position of the first token of each sequence where the batch is padded on the left, or None.

    Raises:
        ValueError: the config has layers that cannot be stored (`cache_refusal(config)`), or the dtype is not supported.
    """

    start: Tensor | None

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype | None = None) -> None:
        if dtype not in STORAGE_DTYPES:
            raise ValueError(
                f"dtype={dtype} is not supported: use one of {', '.join(map(str, STORAGE_DTYPES))}"
            )
        self._fill(DynamicCache(config=config), dtype)

    @classmethod
    def like(cls, cache: DynamicCache, dtype: torch.dtype | None = None) -> CPUCache:
        """Return an empty cache with the layers of `cache`, for which `can_replace` holds."""
        ours = cls.__new__(cls)
        ours._fill(cache, dtype)
        return ours

    @staticmethod
    def can_replace(cache: object) -> bool:
        """Return whether `cache` is an empty default cache of transformers with known layers."""
        return (
            type(cache) is DynamicCache
            and len(cache.layers) > 0
            and all(_is_known(layer) for layer in cache.layers)
            and not cache.offloading
            and cache.get_seq_length() == 0
        )

    @property
    def rows(self) -> Tensor | None:
        """Return the rows int32 [batch, capacity] of the first layer that stores something; see `CPUCacheLayer.rows`."""
        return next((layer.rows for layer in self._filled()), None)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"past_key_values: this cache has {len(self.layers)} layers, but layer {layer_idx} was requested: "
                "pass a cache of the same model, or None"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence b continue sequence beam_idx[b]. No key moves: `rows` records where they lie."""
        layers = self._filled()
        if not layers:
            return
        storage = layers[0].key_storage
        assert storage is not None
        if len(beam_idx) != storage.shape[0]:
            self.batch_select_indices(beam_idx)
            return
        if torch.equal(beam_idx, torch.arange(len(beam_idx), dtype=beam_idx.dtype)):
            return
        self._share_rows(layers)
        for beams, length in {
            (id(layer.beams), layer.length): (layer.beams, layer.length) for layer in layers
        }.values():
            assert beams is not None
            beams.reorder(beam_idx, length)
        if self.start is not None:
            self.start = self.start[beam_idx]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.get_seq_length() == 0:
            self.start = None

    def reset(self) -> None:
        super().reset()
        self.start = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.start is not None:
            self.start = self.start.repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.start is not None:
            self.start = self.start[indices]

    def _fill(self, cache: DynamicCache, dtype: torch.dtype | None) -> None:
        Cache.__init__(self, layers=[_ours(layer, dtype) for layer in cache.layers])
        self.start = None

    def _filled(self) -> list[CPUCacheLayer]:
        return [layer for layer in self.layers if isinstance(layer, CPUCacheLayer) and layer.length]

    @staticmethod
    def _share_rows(layers: list[CPUCacheLayer]) -> None:
        """Give rows to the layers that have none yet; layers whose storage holds the same positions share them."""
        shared: dict[tuple[int, int], BeamRows] = {}
        for layer in layers:
            if layer.beams is None:
                assert layer.key_storage is not None
                positions = (layer.dropped, layer.length)
                if positions not in shared:
                    shared[positions] = BeamRows(layer.key_storage.shape[0], layer.capacity)
                layer.beams = shared[positions]


class CPUCrossCache(CPUCache):
    """Keys and values of the cross-attention of a decoder; the layers are `CPUCrossCacheLayer`s."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence b continue sequence beam_idx[b], which is mostly another beam of the same text."""
        self._select(lambda texts: texts[beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(lambda texts: texts.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(lambda texts: texts[indices])

    def _select(self, change: Callable[[Tensor], Tensor]) -> None:
        known: dict[int, Tensor] = {}
        for layer in self.layers:
            if isinstance(layer, CPUCrossCacheLayer):
                layer.select(change, known)

    def _fill(self, cache: DynamicCache, dtype: torch.dtype | None = None) -> None:
        layers: list[Any] = [
            layer if type(layer) is DummyLayer else CPUCrossCacheLayer(dtype) for layer in cache.layers
        ]
        Cache.__init__(self, layers=layers)
        self.start = None


def cache_refusal(config: PreTrainedConfig) -> str | None:
    """Return why a model with this config gets the cache of transformers, or None if it gets a `CPUCache`."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:  # not every config describes layers with keys and values
        return f"DynamicCache(config=...) raises {type(error).__name__}: {error}"
    others = {type(layer).__name__ for layer in layers if not _is_known(layer)}
    if others:
        return f"its cache has layers with more state than keys and values: {', '.join(sorted(others))}"
    return None


def _is_known(layer: object) -> bool:
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)


def _ours(layer: object, dtype: torch.dtype | None) -> CPUCacheLayer | DummyLayer:
    if type(layer) is DynamicLayer:
        return CPUCacheLayer(dtype)
    if type(layer) is DynamicSlidingWindowLayer:
        ours = CPUSlidingCacheLayer(layer.sliding_window, dtype)
        if layer.record_past:
            ours.activate_past_recording()
        return ours
    if type(layer) is DummyLayer:
        return layer
    raise ValueError(
        f"config: cache layers of type {type(layer).__name__} hold more than keys and values, which CPUCache does not support"
    )
