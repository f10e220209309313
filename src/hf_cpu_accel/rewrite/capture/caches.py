"""Caches of keys, values and states that recorded layers get, and mappings that layers share: known kinds, and copies.

A layer reads and writes only its own part of a cache, the cache layer with its index. Keys and values are written after the
stored ones, or to new tensors: updates of a copy do not change the original. The same holds for recurrent states as `stand_in`
updates them. The last inputs of convolutions are overwritten, and therefore copied.
"""

from __future__ import annotations

import copy
from functools import cache as once
from typing import Any

from torch import Tensor

from hf_cpu_accel.rewrite.capture.shared_states import form_of_shared, is_shared, shared_contents
from hf_cpu_accel.rewrite.core.cache_state import PARTS

_TENSORS = ("keys", "values", "indexer_keys")
# Dictionaries of layers with more state than keys and values.
_STATES = (
    *("conv_states", "recurrent_states", "has_previous_state", "conv_kernel_size"),
    *("is_conv_states_initialized", "is_recurrent_states_initialized"),
)


def is_cache(value: Any) -> bool:
    """Return whether the value is a cache of any kind, or a mapping that layers share."""
    return is_shared(value) or (hasattr(value, "get_seq_length") and hasattr(value, "update"))


def form_of(cache: Any, index: int | None) -> tuple[tuple[Any, ...], list[int]]:
    """Return the form of a cache for steps of layer `index`, and the number of tokens in its parts.

    Raises:
        TypeError: its kind is unknown.
    """
    if is_shared(cache):
        return form_of_shared(cache)
    if index is None:
        raise TypeError("layers that use a cache but have no layer_idx are not recorded")
    form: list[Any] = [type(cache)]
    lengths: list[int] = []
    for part in _parts(cache):
        kind, length = _kind_and_length(part, index)
        lengths.append(length)
        form += (type(part), *kind, length > 0)
    if _is_of_two(cache):
        form.append(bool(cache.is_updated.get(index)))
    return tuple(form), lengths


def copy_cache(cache: Any, index: int | None, *, tensors: bool = False) -> Any:
    """Return a cache for a call of layer `index` in place of `cache`.

    Args:
        tensors: whether the call may write to shared tensors.
    """
    made = copy.copy(cache)
    if is_shared(cache):
        if tensors:
            made.data = {name: tuple(map(_clone, states)) for name, states in cache.data.items()}
        return made
    assert index is not None  # else `form_of` has refused
    if _is_of_two(cache):
        for name in PARTS:
            setattr(made, name, copy_cache(getattr(cache, name), index))
        made.is_updated = dict(cache.is_updated)
    else:
        made.layers = list(cache.layers)
        made.layers[index:] = map(_copied_layer, made.layers[index:])
    return made


def _copied_layer(layer: Any) -> Any:
    made = copy.copy(layer)
    for name in _STATES:
        if name in vars(layer):
            setattr(made, name, _clone_all(getattr(layer, name)))
    return made


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def cache_contents(cache: Any, index: int | None) -> list[Any]:
    """Return copies of the keys, values and states in layer `index`."""
    if is_shared(cache):
        return shared_contents(cache)
    assert index is not None
    layers = [part.layers[index] for part in _parts(cache) if index < len(part.layers)]
    found = [getattr(layer, name, None) for layer in layers for name in (*_TENSORS, *_STATES)]
    return [_clone_all(value) if isinstance(value, dict) else _clone(value) for value in found]


def _clone_all(values: dict[Any, Any]) -> dict[Any, Any]:
    return {key: _clone(value) for key, value in values.items()}


def _parts(cache: Any) -> list[Any]:
    caches, _, _ = _kinds()
    parts = [getattr(cache, name) for name in PARTS] if _is_of_two(cache) else [cache]
    if any(type(part) not in caches or part.offloading for part in parts):
        raise TypeError(f"layers that use {type(cache).__name__} are not recorded")
    return parts


def _kind_and_length(cache: Any, index: int) -> tuple[tuple[Any, ...], int]:
    if index >= len(cache.layers):  # some are made when they are written to
        return (None,), 0
    layer = cache.layers[index]
    if type(layer) not in _kinds()[2] or getattr(layer, "record_past", False):
        raise TypeError(f"layers that use {type(layer).__name__} are not recorded")
    begun = tuple(getattr(layer, "has_previous_state", {}).values())
    return (type(layer), *begun), int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0


def _is_of_two(cache: Any) -> bool:
    """Return whether the cache has parts for an encoder and a decoder."""
    return type(cache) is _kinds()[1]


@once
def _kinds() -> tuple[frozenset[type], type, frozenset[type]]:
    """Return the known classes of caches, the class with two parts, and the classes of layers."""
    from transformers import DynamicCache, EncoderDecoderCache
    from transformers import cache_utils as stock

    from hf_cpu_accel.generate import cache as ours

    caches = frozenset({DynamicCache, ours.CPUCache, ours.CPUCrossCache})
    own = {ours.CPUCacheLayer, ours.CPUSlidingCacheLayer, ours.CPUCrossCacheLayer}
    keys = {stock.DynamicLayer, stock.DynamicSlidingWindowLayer, stock.DynamicIndexedLayer}
    nothing = {
        kind for kind in (getattr(stock, "DummyLayer", None),) if kind
    }  # a layer that uses shared states
    states = {
        stock.LinearAttentionLayer,
        stock.LinearAttentionAndFullAttentionLayer,
        stock.LinearAttentionAndSlidingWindowAttentionLayer,
    }
    return caches, EncoderDecoderCache, frozenset({*keys, *nothing, *states, *own})
