"""Stand-ins for caches during a recording: the layer's use of a cache becomes steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from hf_cpu_accel.rewrite.capture.size import StandIn
from hf_cpu_accel.rewrite.core.foreign_code import ours
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused


def refuse(reason: str) -> NoReturn:
    """Refuse a use of a stand-in that a program cannot repeat.

    Raises:
        Refused: always.
    """
    with ours():
        raise Refused(Refusal(reason))


class Asked(Protocol):
    """The recorder of the use of a cache."""

    def called(self, function: Any, args: Any, kwargs: dict[str, Any], *, effect: bool) -> Any: ...

    def number(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any: ...

    def stand_in(self, made: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any: ...


class _OfCache(StandIn):
    """Base of stand-ins; any attribute that is not defined here is refused, since its value would be constant in all calls."""

    def __init__(self, real: Any, index: int, notes: Asked) -> None:
        self.real, self._index, self._notes = real, index, notes

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # which hosts ask for
        return type(self.real)

    def __getattr__(self, name: str) -> NoReturn:
        refuse(f"it uses {name} of its cache; only keys and values are recorded")

    def __bool__(self) -> bool:
        self.__getattr__("bool")

    def __len__(self) -> int:
        self.__getattr__("len")

    def _is_own(self, index: Any) -> None:
        if not isinstance(index, int) or index != self._index:
            self.__getattr__("another layer's")


class CacheStandIn(_OfCache):
    """Stand-in for a cache, or for one of an encoder and a decoder."""

    def update(self, key_states: Any, value_states: Any, layer_idx: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_own(layer_idx)
        given = (self, key_states, value_states, layer_idx, *args)
        return self._notes.called(update, given, kwargs, effect=True)

    def get_seq_length(self, layer_idx: Any = 0) -> Any:
        return self._notes.number(length_of, (self, layer_idx))

    def update_indexer(self, indexer_key_states: Any, layer_idx: Any) -> Any:
        self._is_own(layer_idx)
        return self._notes.called(update_indexer, (self, indexer_key_states, layer_idx), {}, effect=True)

    def get_conv_state(self, layer_idx: Any, state_idx: Any = 0) -> Any:
        self._is_own(layer_idx)
        return self._notes.called(conv_state, (self, layer_idx, state_idx), {}, effect=False)

    def get_recurrent_state(self, layer_idx: Any, state_idx: Any = 0) -> Any:
        self._is_own(layer_idx)
        return self._notes.called(recurrent_state, (self, layer_idx, state_idx), {}, effect=False)

    def update_conv_state(self, conv_states: Any, layer_idx: Any, state_idx: Any = 0, **kwargs: Any) -> Any:
        self._is_own(layer_idx)
        given = (self, conv_states, layer_idx, state_idx)
        return self._notes.called(update_conv_state, given, kwargs, effect=True)

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: Any, state_idx: Any = 0) -> Any:
        self._is_own(layer_idx)
        given = (self, recurrent_states, layer_idx, state_idx)
        return self._notes.called(update_recurrent_state, given, {}, effect=True)

    def is_recording_past(self, layer_idx: Any) -> bool:
        return False  # such caches are not taken

    def __bool__(self) -> bool:
        is_any: bool = self._notes.number(bool, (self,))
        return is_any

    @property
    def self_attention_cache(self) -> Any:
        return self._part("self_attention_cache")

    @property
    def cross_attention_cache(self) -> Any:
        return self._part("cross_attention_cache")

    @property
    def is_updated(self) -> Any:
        return _IsUpdated(self.real, self._index, self._notes, self)

    @property
    def layers(self) -> Any:
        return _Layers(self.real, self._index, self._notes, self)

    def _part(self, name: str) -> Any:
        made = CacheStandIn(getattr(self.real, name), self._index, self._notes)
        return self._notes.stand_in(made, getattr, (self, name))


class _OfPart(_OfCache):
    def __init__(self, real: Any, index: int, notes: Asked, cache: CacheStandIn) -> None:
        super().__init__(real, index, notes)
        self._cache = cache


class _IsUpdated(_OfPart):
    """Stand-in for the flags of cross-attention layers that are computed."""

    def get(self, index: Any, default: Any = None) -> Any:
        self._is_own(index)
        return self._notes.number(is_done, (self._cache, index))

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._is_own(index)
        self._notes.called(mark_done, (self._cache, index, value), {}, effect=True)


class _Layers(_OfPart):
    def __getitem__(self, index: Any) -> Any:
        self._is_own(index)
        return _Layer(self.real, self._index, self._notes, self._cache)


class _Layer(_OfPart):
    @property
    def keys(self) -> Any:
        return self._notes.called(keys_of, (self._cache, self._index), {}, effect=False)

    @property
    def values(self) -> Any:
        return self._notes.called(values_of, (self._cache, self._index), {}, effect=False)

    def get_seq_length(self) -> Any:
        return self._cache.get_seq_length(self._index)


def update(cache: Any, *args: Any, **kwargs: Any) -> Any:
    return cache.update(*args, **kwargs)


def update_indexer(cache: Any, states: Tensor, index: int) -> Any:
    return cache.update_indexer(states, index)


def conv_state(cache: Any, index: int, number: int) -> Any:
    return cache.get_conv_state(index, number)


def recurrent_state(cache: Any, index: int, number: int) -> Any:
    return cache.get_recurrent_state(index, number)


def update_conv_state(cache: Any, states: Tensor, index: int, number: int, **kwargs: Any) -> Any:
    return cache.update_conv_state(states, index, number, **kwargs)


def update_recurrent_state(cache: Any, states: Tensor, index: int, number: int) -> Any:
    """Update a state like the method of the cache, but leave the stored tensor unchanged."""
    layer = cache.layers[index]
    if layer.is_recurrent_states_initialized[number]:
        layer.recurrent_states[number] = torch.empty_like(layer.recurrent_states[number])
    return cache.update_recurrent_state(states, index, number)


def length_of(cache: Any, index: int) -> int:
    return int(cache.get_seq_length(index))


def is_done(cache: Any, index: int) -> bool:
    return bool(cache.is_updated.get(index))


def mark_done(cache: Any, index: int, value: bool) -> None:
    cache.is_updated[index] = value


def keys_of(cache: Any, index: int) -> Tensor | None:
    keys: Tensor | None = cache.layers[index].keys
    return keys


def values_of(cache: Any, index: int) -> Tensor | None:
    values: Tensor | None = cache.layers[index].values
    return values


# Functions that write only to the layer's own part of a cache.
WRITE_TO_CACHE = frozenset({update, update_indexer, update_conv_state, update_recurrent_state, mark_done})
