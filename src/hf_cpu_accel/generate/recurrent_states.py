"""The states of recurrent layers in caches of transformers: tensors that ops write in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, LinearAttentionLayer

from hf_cpu_accel.generate.cache_layer import outside_inference_mode

__all__ = ["StateSizes", "begun_states_of", "empty_cache", "states_of"]

_CACHES = (DynamicCache, StaticCache, Cache)
States = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class StateSizes:
    """The sizes of the states of a layer, for each sequence.

    Attributes:
        channels, taps: sizes of the last inputs of its convolution.
        state: the sizes of its recurrent state, which is float32, or None without one.
    """

    channels: int
    taps: int
    state: tuple[int, ...] | None = None

    def zeros(self, batch: int, dtype: torch.dtype) -> States:
        """Return the states before the first token."""
        conv = torch.zeros(batch, self.channels, self.taps, dtype=dtype)
        return conv, None if self.state is None else torch.zeros(batch, *self.state, dtype=torch.float32)


def states_of(cache: Any, index: int, sizes: StateSizes, batch: int, dtype: torch.dtype) -> States | None:
    """Return the states in layer `index` of `cache`, which count as initialized from now on, or None if an op cannot write them.

    Args:
        dtype: of the inputs of the convolution.
    """
    layer = _layer_of(cache, index)
    if layer is None:
        return None
    _initialize(layer, sizes, batch, dtype)
    states: Any = layer.conv_states[0], layer.recurrent_states[0]
    if not _fit(states, sizes, batch):
        return None
    if not layer.has_previous_state[0]:
        for state in states:
            if state is not None:
                state.zero_()
        layer.has_previous_state[0] = True
    kept: States = states
    return kept


def begun_states_of(cache: Any, index: int, sizes: StateSizes, batch: int) -> States | None:
    """Return the states in layer `index` of `cache`, without changing it, or None if they are not initialized or an op cannot
    write them."""
    layer = _layer_of(cache, index)
    if layer is None or not layer.has_previous_state[0]:
        return None
    states: Any = layer.conv_states[0], layer.recurrent_states[0]
    return states if _fit(states, sizes, batch) else None


def empty_cache(layers: int) -> Cache:
    """Return a cache of `layers` recurrent layers, as a host creates it."""
    return Cache(layers=[LinearAttentionLayer() for _ in range(layers)])


def _layer_of(cache: Any, index: int) -> LinearAttentionLayer | None:
    """Return the layer, or None if an op cannot write to its states."""
    layer = cache.layers[index] if type(cache) in _CACHES and index < len(cache.layers) else None
    if cache.offloading or not isinstance(layer, LinearAttentionLayer):
        return None
    return None if layer.record_past or layer.number_of_states != 1 else layer


def _initialize(layer: LinearAttentionLayer, sizes: StateSizes, batch: int, dtype: torch.dtype) -> None:
    if layer.is_conv_states_initialized[0]:
        return
    with outside_inference_mode():
        conv, state = sizes.zeros(batch, dtype)
        layer.lazy_initialization(conv_states=conv)
        if state is not None:
            layer.lazy_initialization(recurrent_states=state)


def _fit(states: tuple[Any, Any], sizes: StateSizes, batch: int) -> bool:
    conv, state = states
    if conv.shape != (batch, sizes.channels, sizes.taps) or not conv.is_contiguous():
        return False
    if conv.dtype not in (torch.float32, torch.bfloat16) or (state is None) is not (sizes.state is None):
        return False
    return state is None or (
        state.shape == (batch, *sizes.state) and state.dtype is torch.float32 and state.is_contiguous()  # type: ignore[misc]
    )
