"""Beam search by index: record in which row of the storage each key lies, so that no key is copied between beams."""

from __future__ import annotations

import torch
from torch import Tensor


class BeamRows:
    """The row of the storage that holds position t of sequence b: `rows[b, t]`.

    New tokens of sequence b are written to row b, so all positions from the length on are b. A decode step changes nothing here,
    only reordering the beams does. Layers whose storage holds the same positions share one object.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        self._own = torch.arange(batch, dtype=torch.int32)[:, None]
        self._rows = self._own.repeat(1, capacity)
        self._index: tuple[tuple[int, ...], Tensor] | None = None

    @property
    def batch(self) -> int:
        return self._rows.shape[0]

    def covering(self, capacity: int) -> Tensor:
        """Return the rows, int32 [batch, at least `capacity`]."""
        missing = capacity - self._rows.shape[1]
        if missing > 0:
            self._rows = torch.cat([self._rows, self._own.repeat(1, missing)], dim=1)
        return self._rows

    def reorder(self, beam_idx: Tensor, length: int) -> None:
        """Let sequence b continue sequence beam_idx[b], up to `length`."""
        self._rows[:, :length] = self.covering(length)[beam_idx, :length]
        self._index = None

    def crop(self, length: int) -> None:
        """Forget the positions from `length` on."""
        self._rows[:, length:] = self._own
        self._index = None

    def gather(self, storage: Tensor, first: int, last: int) -> Tensor:
        """Return the positions `first` to `last` of all sequences: a copy [batch, heads, last - first, features] of a storage."""
        heads, capacity, features = storage.shape[1:]
        vectors = storage.view(-1, features).index_select(0, self._flat(first, last, heads, capacity))
        return vectors.view(self.batch, heads, last - first, features)

    def _flat(self, first: int, last: int, heads: int, capacity: int) -> Tensor:
        """Return the index of each vector in a storage, int64 [batch * heads * (last - first)], the same for all layers of a
        step."""
        wanted = (first, last, heads, capacity)
        if self._index is None or self._index[0] != wanted:
            rows = self.covering(last)[:, None, first:last].long()
            block = (rows * heads + torch.arange(heads)[:, None]) * capacity
            self._index = wanted, (block + torch.arange(first, last)).view(-1)
        return self._index[1]
