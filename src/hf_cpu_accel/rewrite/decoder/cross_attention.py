"""What decoder layers look at in their encoder's output: keys and values, made once per text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.lazy.remember import remember
from hf_cpu_accel.rewrite.attention.masks import as_key_padding
from hf_cpu_accel.rewrite.decoder.caches import cross_layer
from hf_cpu_accel.rewrite.decoder.role import BoundLayer


@dataclass(frozen=True)
class EncoderMemory:
    """What a layer was given of its encoder.

    Attributes:
        states: [B, length, C].
        mask: as the host made it, readable by `key_padding`, or None.
        cache: transformers' EncoderDecoderCache, or None where nothing is kept.
    """

    states: Tensor
    mask: Tensor | None
    cache: Any

    def is_same(self, other: EncoderMemory) -> bool:
        return self.states is other.states and self.mask is other.mask and self.cache is other.cache

    def padding(self) -> Tensor | None:
        """bool [B, length], True where there is a token, or None."""
        return None if self.mask is None else key_padding(self.mask, self.states.shape[0])


@dataclass(frozen=True)
class CrossArguments:
    """The op's arguments of these names."""

    cross_keys: list[Tensor]
    cross_values: list[Tensor]
    cross_padding: Tensor | None
    cross_rows: Tensor | None


def key_padding(mask: Tensor, batch: int) -> Tensor | None:
    """bool [batch, length] if that is what `mask` [B, 1, q_len, length] says, the same for all queries; else None.

    In numbers that are added to scores it says so by zeros, and by the smallest number where padding is (NLLB-MoE, Speech2Text).
    """
    if mask.dim() != 4 or mask.shape[0] not in (1, batch):
        return None
    padding = as_key_padding(mask, batch)
    if padding.dim() != 2:
        return None
    if mask.is_floating_point():
        return remember(mask, ("key padding", batch), lambda: _zeros_of(padding))
    return padding if mask.dtype is torch.bool else None


def _zeros_of(added: Tensor) -> Tensor | None:
    """Where `added` [batch, length] is 0, if elsewhere it hides keys, though not all of a row, which then would count alike."""
    zeros = added == 0
    hidden = added <= torch.finfo(added.dtype).min / 2
    return zeros if bool((zeros | hidden).all() and zeros.any(1).all()) else None


def cross_arguments(layers: Sequence[BoundLayer], memory: EncoderMemory) -> CrossArguments:
    """Keys and values for the layers: from the cache, into which they go where it has none yet."""
    cache, sequences = memory.cache, None
    keys, values, rows = [], [], []
    for layer in layers:
        index, cross = layer.role.cache_index, layer.role.parts.cross
        assert cross is not None
        held = None if cache is None else cross_layer(cache, index)
        if held is not None and cache.is_updated.get(index):
            key, value, row = _stored(held)
        else:
            sequences = sequences or _encoder_sequences(memory.states)
            key, value = cross.encode(layer, sequences[0])
            row = sequences[1]
            if held is not None:
                key, value, row = _store(held, key, value, row)
                cache.is_updated[index] = True
        keys.append(key)
        values.append(value)
        rows.append(row)
    if any(row is not rows[0] for row in rows):  # some layers stored theirs by themselves
        pairs = list(zip(keys, values, rows, strict=True))
        keys = [key if row is None else key[row.long()] for key, _, row in pairs]
        values = [value if row is None else value[row.long()] for _, value, row in pairs]
        rows = [None]
    return CrossArguments(keys, values, memory.padding(), rows[0])


def _stored(held: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """(keys, values, the row of each sequence) of a layer of a cache; transformers' own hold a row for each."""
    if hasattr(held, "encoder_sequences"):
        return held.key_storage, held.value_storage, held.encoder_sequences
    return held.keys, held.values, None


def _store(held: Any, key: Tensor, value: Tensor, row: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Have a layer of a cache hold these; returned as they are held."""
    if hasattr(held, "encoder_sequences"):
        return *held.store(key, value, row), row
    if row is not None:
        key, value = key[row.long()], value[row.long()]
    return *held.update(key, value), None


def _encoder_sequences(states: Tensor) -> tuple[Tensor, Tensor | None]:
    """The different sequences among states [B, length, C], and int32 [B] which of them each row has: beams follow one another."""
    batch = states.shape[0]
    first = [0, *(b for b in range(1, batch) if not torch.equal(states[b], states[b - 1]))]
    if len(first) == batch:
        return states, None
    ends = [*first[1:], batch]
    counts = torch.tensor([end - begin for begin, end in zip(first, ends, strict=True)])
    rows = torch.arange(len(first), dtype=torch.int32).repeat_interleave(counts)
    return states[first], rows
