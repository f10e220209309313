"""Save and restore the state that a call of a layer may write: caches of keys, values and states, and mappings that layers share.

A layer reads and writes only its own part of a cache: the cache layer that has its index.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

PARTS = ("self_attention_cache", "cross_attention_cache")  # of the cache of an encoder-decoder
_OVERWRITTEN = "conv_states"  # also by code that creates new tensors for keys, values and recurrent states

# Each: a container and its contents: the length of a list, a copy of a tensor.
Snapshot = list[tuple[Any, Any]]


def snapshot(cache: Any, index: int | None, *, by_kernels: bool = False) -> Snapshot:
    """Return what `put_back` takes after a call of a layer, or after a part of one.

    Args:
        cache: also a mapping.
        index: of the layer's part of a cache.
        by_kernels: whether the call writes over keys, values and recurrent states where they lie. Their copies cost memory.
    """
    if isinstance(cache, MutableMapping):
        return [(cache, dict(cache))]
    assert index is not None
    states: Snapshot = []
    parts = [getattr(cache, name) for name in PARTS if hasattr(cache, name)]
    if parts:
        states.append((cache.is_updated, cache.is_updated.copy()))
    for part in parts or [cache]:
        states.append((vars(part), vars(part).copy()))
        if index < len(part.layers):
            states += _of_layer(vars(part.layers[index]), by_kernels=by_kernels)
        else:
            states.append((part.layers, len(part.layers)))
    return states


def put_back(states: Snapshot) -> None:
    """Restore the state that `snapshot` returned."""
    for holder, before in states:
        if isinstance(holder, Tensor):
            _write(holder, before)
        elif isinstance(holder, list):
            del holder[before:]
        else:
            holder.clear()
            holder.update(before)


def _of_layer(state: dict[str, Any], *, by_kernels: bool) -> Iterator[tuple[Any, Any]]:
    """Yield the attributes of a cache layer, and the contents of the dictionaries and tensors among them."""
    yield state, state.copy()
    for name, value in state.items():
        copied = by_kernels or name == _OVERWRITTEN
        if isinstance(value, dict):
            yield value, value.copy()
        if copied:
            values = value.values() if isinstance(value, dict) else (value,)
            yield from ((tensor, tensor.clone()) for tensor in values if isinstance(tensor, Tensor))


def _write(tensor: Tensor, values: Tensor) -> None:
    with torch.inference_mode():  # inference tensors can be written only here
        if not torch.equal(tensor, values):
            tensor.copy_(values)
