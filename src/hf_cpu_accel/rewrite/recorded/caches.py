"""Caches of keys and values that recorded layers are called with: which are known, their copies, and how they are put back.

A layer reads and writes its own part of a cache only, the layer of the cache that has its index. The kinds of these that are known
write behind what they hold, or to new tensors: what a copy of one is given changes nothing that the original holds.
"""

from __future__ import annotations

import copy
from functools import cache as once
from typing import Any

_PARTS = ("self_attention_cache", "cross_attention_cache")

# Of the layers of a cache, how many there are, and of which cross attention is done: (what holds it, what it held).
Saved = list[tuple[Any, Any]]


def is_cache(value: Any) -> bool:
    """Whether it is one of any kind."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def form_of(cache: Any, index: int | None) -> tuple[tuple[Any, ...], list[int]]:
    """What steps of layer `index` are for, and how many tokens are in the parts of the cache.

    Raises:
        TypeError: it is of no kind that is known.
    """
    if index is None:
        raise TypeError("a cache of which the layer does not say what part is its own")
    form: list[Any] = [type(cache)]
    lengths: list[int] = []
    for part in _parts(cache):
        kind, length = _kind_and_length(part, index)
        lengths.append(length)
        form += (type(part), kind, length > 0)
    if type(cache) is _kinds()[1]:
        form.append(bool(cache.is_updated.get(index)))
    return tuple(form), lengths


def copied(cache: Any, index: int) -> Any:
    """A cache that layer `index` can be called with in the place of `cache`."""
    made = copy.copy(cache)
    if type(cache) is _kinds()[1]:
        for name in _PARTS:
            setattr(made, name, copied(getattr(cache, name), index))
        made.is_updated = dict(cache.is_updated)
    else:
        made.layers = list(cache.layers)
        made.layers[index:] = map(copy.copy, made.layers[index:])
    return made


def saved(cache: Any, index: int) -> Saved:
    """What `put_back` takes after a call of layer `index`, or after a part of one."""
    states: Saved = []
    for part in _parts(cache):
        if index < len(part.layers):
            state = vars(part.layers[index])
            states.append((state, state.copy()))
        else:
            states.append((part.layers, len(part.layers)))
    if type(cache) is _kinds()[1]:
        states.append((cache.is_updated, cache.is_updated.copy()))
    return states


def put_back(saved: Saved) -> None:
    for state, before in saved:
        if isinstance(state, list):
            del state[before:]
        else:
            state.clear()
            state.update(before)


def held(cache: Any, index: int) -> list[Any]:
    """The keys and values in layer `index`."""
    layers = [part.layers[index] for part in _parts(cache) if index < len(part.layers)]
    return [getattr(layer, name) for layer in layers for name in _TENSORS if hasattr(layer, name)]


_TENSORS = ("keys", "values", "indexer_keys")


def _parts(cache: Any) -> list[Any]:
    caches, both, _ = _kinds()
    parts = [getattr(cache, name) for name in _PARTS] if type(cache) is both else [cache]
    if any(type(part) not in caches or part.offloading for part in parts):
        raise TypeError(f"a {type(cache).__name__}, which no program can take")
    return parts


def _kind_and_length(cache: Any, index: int) -> tuple[Any, int]:
    if index >= len(cache.layers):  # some are made when they are written to
        return None, 0
    layer = cache.layers[index]
    if type(layer) not in _kinds()[2]:
        raise TypeError(f"a cache with a {type(layer).__name__}, which no program can take")
    return type(layer), int(layer.get_seq_length())


@once
def _kinds() -> tuple[frozenset[type], type, frozenset[type]]:
    """Of caches, of those of an encoder and a decoder, and of layers."""
    from transformers import DynamicCache, EncoderDecoderCache
    from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

    from hf_cpu_accel.generate import cache as ours

    caches = frozenset({DynamicCache, ours.CPUCache, ours.CPUCrossCache})
    own = {ours.CPUCacheLayer, ours.CPUSlidingCacheLayer, ours.CPUCrossCacheLayer}
    stock = {DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer}
    return caches, EncoderDecoderCache, frozenset({*stock, *own})
