"""Keys and values for the cross-attention of decoder layers, computed once per text."""

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
    """The encoder output that a layer got.

    Attributes:
        states: [B, length, C].
        mask: the mask of the host, readable by `key_padding`, or None.
        cache: the EncoderDecoderCache of transformers, or None without a cache.
    """

    states: Tensor
    mask: Tensor | None
    cache: Any

    def is_same(self, other: EncoderMemory) -> bool:
        return self.states is other.states and self.mask is other.mask and self.cache is other.cache

    def padding(self) -> Tensor | None:
        """Return bool [B, length], True where there is a token, or None."""
        return None if self.mask is None else key_padding(self.mask, self.states.shape[0])


@dataclass(frozen=True)
class CrossArguments:
    """The arguments of the op with these names."""

    cross_keys: list[Tensor]
    cross_values: list[Tensor]
    cross_padding: Tensor | None
    cross_rows: Tensor | None


def key_padding(mask: Tensor, batch: int) -> Tensor | None:
    """Return `mask` [B, 1, q_len, length] as bool [batch, length] if it is equal for all queries, else None.

    A mask that is added to scores has zeros for tokens, and the smallest number for padding (NLLB-MoE, Speech2Text).
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
    """Return where `added` [batch, length] is 0, if it hides all other keys, but not a whole row, whose keys would then count
    alike."""
    zeros = added == 0
    hidden = added <= torch.finfo(added.dtype).min / 2
    return zeros if bool((zeros | hidden).all() and zeros.any(1).all()) else None


def cross_arguments(layers: Sequence[BoundLayer], memory: EncoderMemory) -> CrossArguments:
    """Return keys and values for the layers from the cache, and store them there if they are missing."""
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
    """Return (keys, values, the row of each sequence) of a cache layer; those of transformers have a row for each."""
    if hasattr(held, "encoder_sequences"):
        return held.key_storage, held.value_storage, held.encoder_sequences
    return held.keys, held.values, None


def _store(held: Any, key: Tensor, value: Tensor, row: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Store these in a cache layer, and return them as stored."""
    if hasattr(held, "encoder_sequences"):
        return *held.store(key, value, row), row
    if row is not None:
        key, value = key[row.long()], value[row.long()]
    return *held.update(key, value), None


def _encoder_sequences(states: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the different sequences among states [B, length, C], and their index for each row, int32 [B]: beams are adjacent."""
    batch = states.shape[0]
    first = [0, *(b for b in range(1, batch) if not torch.equal(states[b], states[b - 1]))]
    if len(first) == batch:
        return states, None
    ends = [*first[1:], batch]
    counts = torch.tensor([end - begin for begin, end in zip(first, ends, strict=True)])
    rows = torch.arange(len(first), dtype=torch.int32).repeat_interleave(counts)
    return states[first], rows
