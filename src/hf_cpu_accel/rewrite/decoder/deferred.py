"""Hidden states between decoder layers, which are computed when they are read, by all layers that have not run yet."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_cpu_accel.hosts.output_capturing import is_collecting
from hf_cpu_accel.lazy.causal_mask import CausalMask
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.lazy.shared_heads import KeptHeads
from hf_cpu_accel.ops.decoder.layers import BoundLayers, DecoderLayer, bind
from hf_cpu_accel.patching.hooks import has_foreign_hook
from hf_cpu_accel.rewrite.decoder.caches import storage_of
from hf_cpu_accel.rewrite.decoder.cross_attention import CrossArguments, EncoderMemory, cross_arguments
from hf_cpu_accel.rewrite.decoder.masks import same_mask, start_and_mask
from hf_cpu_accel.rewrite.decoder.role import Bound, BoundLayer

if TYPE_CHECKING:
    from transformers import Cache

    from hf_cpu_accel.generate.host_layers import KeyValueStorage

_NO_CROSS = CrossArguments([], [], None, None)
_DECODER_LAYERS = torch.ops.hf_cpu_accel.decoder_layers.default


@dataclass(frozen=True)
class Call:
    """A layer and its arguments; None for arguments that were not passed.

    Attributes:
        mask: numbers to add to the scores if it is not a `CausalMask`.
        rotary: the source of its tables.
        relative: the table of its position bias, its own or one from its arguments; see `PositionBias`.
        memory: the encoder output for its cross-attention.
        per_layer: the layer's own input [B, q_len, I], if it has one.
        keeps, takes: keys and values that it stores for later layers, and those of another layer that it uses instead of its
            own.
        states: those of its recurrence, in place of keys and values; None for a layer with attention.
    """

    layer: BoundLayer | Bound
    cache: Cache | None
    mask: CausalMask | Tensor | None
    rotary: Any
    relative: Tensor | None = None
    memory: EncoderMemory | None = None
    per_layer: Tensor | None = None
    keeps: KeptHeads | None = None
    takes: KeptHeads | None = None
    states: tuple[Tensor, Tensor] | None = None

    @property
    def attending(self) -> BoundLayer:
        """Return the layer, which has attention instead of a recurrence."""
        assert isinstance(self.layer, BoundLayer)
        return self.layer

    @property
    def rotary_group(self) -> int | None:
        source = None if self.states is not None else self.attending.role.rotary
        return None if source is None else source.group

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of its positions."""
        source = self.attending.role.rotary
        assert source is not None
        return source.tables(self.attending, self.rotary)


class DeferredHiddenStates(LazyTensor):
    """[B, q_len, C] after some layers, which have not run yet.

    Nothing changes before they run: a model may stop early or fail between two layers, and two threads may run one. Each layer
    runs once per call. If the host keeps the hidden states of several layers, all of them are computed, in order.
    """

    _input: Tensor
    _calls: tuple[Call, ...]
    _before: tuple[weakref.ref[DeferredHiddenStates], ...]  # after each of the calls but the last
    _next: weakref.ref[DeferredHiddenStates] | None  # after the first layer that was called with these

    @classmethod
    def after(cls, hidden_states: Tensor, call: Call) -> DeferredHiddenStates:
        """Return the output of `call` for `hidden_states`."""
        if not isinstance(hidden_states, DeferredHiddenStates):
            # A copy: it may be a buffer that its owner overwrites before the result is read.
            return cls._of(hidden_states.clone(), (call,), ())
        with hidden_states._lock:
            if hidden_states._next is not None:
                hidden_states.tensor  # noqa: B018 (another layer has it already: it must be computed once for both)
            if hidden_states._tensor is not None:
                return cls._of(hidden_states._tensor, (call,), ())
            before = (*hidden_states._before, weakref.ref(hidden_states))
            deferred = cls._of(hidden_states._input, (*hidden_states._calls, call), before)
            deferred._lock = hidden_states._lock  # one lock for all hidden states of a chain
            hidden_states._next = weakref.ref(deferred)
            return deferred

    @classmethod
    def _of(
        cls, input: Tensor, calls: tuple[Call, ...], before: tuple[weakref.ref[DeferredHiddenStates], ...]
    ) -> DeferredHiddenStates:
        deferred: DeferredHiddenStates = cls.like(input.shape, input.dtype)
        deferred._input, deferred._calls, deferred._before, deferred._next = input, calls, before, None
        for call in calls:
            if call.keeps is not None:
                call.keeps.makers.append(weakref.ref(deferred))
        return deferred

    def will_keep(self, kept: KeptHeads) -> bool:
        """Return whether one of the layers that have not run yet stores `kept` in its cache."""
        with self._lock:
            return self._tensor is None and any(call.keeps is kept for call in self._calls)

    @property
    def tensor(self) -> Tensor:
        """Return the values. The layer that was called with them runs first, since a reader may write to them."""
        if self._tensor is None:
            with self._lock:
                following = None if self._next is None else self._next()
                if self._tensor is None and following is not None:
                    following.tensor  # noqa: B018 (makes these on its way)
        return super().tensor

    def _make(self) -> Tensor:
        hidden_states, done = self._input, 0
        for number, reference in enumerate(self._before, start=1):
            kept = reference()
            if kept is None:
                continue
            if kept._tensor is None:
                kept._tensor = run(hidden_states, self._calls[done:number])
            hidden_states, done = kept._tensor, number
        return run(hidden_states, self._calls[done:])

    def _forget(self) -> None:
        del self._input, self._calls, self._before


def _bound_run(calls: Sequence[Call]) -> BoundLayers:
    """Return the bound arguments of the layers of `calls`, bound at first use and again when weights change."""
    runs = calls[-1].layer.bound_runs
    weights = [call.layer.weights for call in calls]
    parts = [*weights, *(call.relative for call in calls)]
    known = runs.get(len(calls))
    if known is not None and all(map(operator.is_, known[0], parts)):
        return known[1]
    found = [call.rotary_group for call in calls]
    groups = list(dict.fromkeys(group for group in found if group is not None))
    tables = [0 if group is None else groups.index(group) for group in found]
    bound = bind(
        [
            _with_tables(layer, table, call.relative)
            for layer, table, call in zip(weights, tables, calls, strict=True)
        ]
    )
    runs[len(calls)] = (parts, bound)
    return bound


def run(hidden_states: Tensor, calls: Sequence[Call]) -> Tensor:
    """Run the layers of `calls` one after another, in as few calls of the op as their arguments allow."""
    while calls:
        together = _together(calls)
        hidden_states = _run_together(hidden_states, calls[:together])
        calls = calls[together:]
    return hidden_states


def _together(calls: Sequence[Call]) -> int:
    """Return how many of the calls, from the first on, agree on the cache, the padding, the rotary tables of their group and the
    encoder output."""
    first = calls[0]
    positions: dict[int, Any] = {}
    mask = alike = next((call.mask for call in calls if call.states is None), None)
    for number, call in enumerate(calls):
        if call.cache is not first.cache or not _same_memory(call.memory, first.memory):
            return number
        if call.states is not None:
            continue
        group = call.rotary_group
        if group is not None and positions.setdefault(group, call.rotary) is not call.rotary:
            return number
        if call.mask is not alike and not same_mask(call.mask, mask):
            return number
        alike = call.mask
    return len(calls)


def _run_together(hidden_states: Tensor, calls: Sequence[Call]) -> Tensor:
    bound = _bound_run(calls)
    batch, q_len, _ = hidden_states.shape
    cache = calls[0].cache
    keys, values, past = [], [], []
    rows = None
    stores: list[KeyValueStorage] = []
    read: list[tuple[int, KeyValueStorage]] = []  # with how many tokens were in there before the call
    dropped = 0
    if cache is None:
        scratch: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        for sizes in bound.cache_heads:
            if sizes not in scratch:
                scratch[sizes] = _scratch(hidden_states, *sizes)
            keys.append(scratch[sizes][0])
            values.append(scratch[sizes][1])
            past.append(0)
    else:
        for call, sizes in zip(calls, bound.cache_heads, strict=True):
            if call.states is not None:
                keys.append(call.states[0])
                values.append(call.states[1])
                past.append(0)
                continue
            store, held = _store_of(call, batch, q_len, sizes, hidden_states.dtype)
            assert store.key_storage is not None
            assert store.value_storage is not None
            if call.takes is None:
                stores.append(store)
            read.append((held, store))
            keys.append(store.key_storage)
            values.append(store.value_storage)
            past.append(held)
        if read:
            longest = max(read, key=lambda pair: pair[0])[1]
            rows, dropped = longest.rows, longest.dropped
    start, mask = start_and_mask([call.mask for call in calls if call.states is None], cache, dropped)
    tables: dict[int, tuple[Tensor, Tensor]] = {}  # in the order in which the layers were bound to them
    for call in calls:
        group = call.rotary_group
        if group is not None and group not in tables:
            tables[group] = call.tables()
    rotary = [table for pair in tables.values() for table in pair]
    memory = calls[0].memory
    cross = _NO_CROSS if memory is None else cross_arguments([call.attending for call in calls], memory)
    output = _DECODER_LAYERS(
        hidden_states, bound.weights, bound.vectors, bound.layout, bound.scalars, keys, values, past, rotary, start, rows, mask,
        cross.cross_keys, cross.cross_values, cross.cross_padding, cross.cross_rows,
        [call.per_layer for call in calls if call.per_layer is not None],
    )  # fmt: skip
    for store in stores:
        store.advance(q_len)
    for call in calls:
        if call.keeps is not None:
            call.keeps.end()
    return output


def _store_of(
    call: Call, batch: int, q_len: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> tuple[KeyValueStorage, int]:
    """Return the storage of the keys and values that a layer attends to, and the number of tokens in it before this call."""
    role, kept = call.attending.role, call.takes
    if kept is not None:
        return kept.store, kept.stored + kept.tokens - q_len
    store = storage_of(call.cache, role.cache_index, role.parts.repeats)
    assert store is not None
    store.reserve(batch, *sizes, dtype, q_len)
    if call.keeps is not None:
        call.keeps.begin(store)
    return store, store.length


def _scratch(hidden_states: Tensor, kv_heads: int, head_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return space for keys and values of one layer at a time, without a cache."""
    batch, q_len, _ = hidden_states.shape
    return (
        hidden_states.new_empty(batch, kv_heads, q_len, head_dim),
        hidden_states.new_empty(batch, kv_heads, q_len, value_dim),
    )


def _same_memory(one: EncoderMemory | None, other: EncoderMemory | None) -> bool:
    return one is other or (one is not None and other is not None and one.is_same(other))


def _with_tables(layer: DecoderLayer, rotary: int, relative: Tensor | None) -> DecoderLayer:
    attention = dataclasses.replace(layer.attention, rotary=rotary, relative=relative)
    return dataclasses.replace(layer, attention=attention)


def is_handed_on(hooks: dict[int, Any], of_next: dict[int, Any]) -> bool:
    """Return whether hooks get the hidden states after a layer, and may keep them or write to the arguments of layers.

    Args:
        hooks: of the layer's forward.
        of_next: forward pre-hooks of the layer that follows.
    """
    if of_next and has_foreign_hook(of_next):
        return True
    return bool(hooks) and (has_foreign_hook(hooks) or is_collecting("hidden_states"))
