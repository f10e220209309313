"""The sequences that go on together, one token of each per step, in one cache that they join and leave.

They end at one position of the cache, so a step writes one column and is one call of the op over all layers; each begins where
its length says, and what is before that is left padding, which is neither computed nor read. Keys know their position in their own
sequence, so a sequence may be moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cpu_accel.generate.cache_layer import bucket
from hf_cpu_accel.generate.replay.steps import DecodeSteps
from hf_cpu_accel.serve.engine.forward import Forward
from hf_cpu_accel.serve.engine.storage import Part, Storage

_UNCHANGED = 4  # steps before some are captured: rows that change all the time are not worth it


class Batch:
    """Rows of a cache, each a sequence of its own length.

    Args:
        most: rows that there may be.

    Attributes:
        lengths: tokens of each row.
    """

    def __init__(self, forward: Forward, most: int) -> None:
        self._forward, self._most = forward, most
        self._cache = forward.new_cache()
        self._storage = Storage(forward.layout, 1, 0)
        self._end = 0  # position behind the last token of all rows
        self.lengths: list[int] = []
        self._start = self._mask = torch.zeros(0, dtype=torch.long)
        self._steps: DecodeSteps | None = None  # from one change of the rows to the next
        self._unchanged = 0  # steps since then

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, part: Part) -> None:
        """A new last row, with these keys and values."""
        length = part[0].shape[2]
        self.lengths.append(length)
        if len(self) > self._storage.rows or length > self._end:
            self._rebuild(len(self) - 1)
        self._storage.write(len(self) - 1, self._end - length, part)
        self._rows_changed()

    def remove(self, row: int) -> None:
        """The last row takes the place of `row`."""
        last = len(self) - 1
        if row != last:
            self._storage.write(row, self._end - self.lengths[last], self.read(last, 0, self.lengths[last]))
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        if self.lengths:
            self._rows_changed()
        else:
            self._storage, self._end = Storage(self._forward.layout, 1, 0), 0

    def read(self, row: int, first: int, last: int) -> Part:
        """Views of the keys and values of the positions `first` to `last` of a row."""
        start = self._end - self.lengths[row]
        return self._storage.part(row, start + first, start + last)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to each row.

        Returns:
            Logits, float32 [rows, vocabulary].
        """
        if self._end == self._storage.capacity:
            self._rebuild(len(self))
            self._rows_changed()
        ids = torch.tensor(tokens)[:, None]
        positions = self._end - self._start[:, None]
        if self._steps is None and self._unchanged >= _UNCHANGED:
            self._steps = self._forward.steps(self._cache, self._end)
        self._unchanged += 1
        logits = self._forward(ids, positions, self._mask[:, : self._end + 1], self._cache, self._steps)
        self._end += 1
        self.lengths = [length + 1 for length in self.lengths]
        return logits

    def _rebuild(self, filled: int) -> None:
        """A storage with room for what is there and is to come; the first `filled` rows have something in theirs."""
        before, end = self._storage, self._end
        rows = before.rows
        while rows < len(self):
            rows = min(2 * rows, self._most)
        self._end = max(self.lengths)
        self._storage = Storage(self._forward.layout, rows, bucket(self._end))
        for row, length in enumerate(self.lengths[:filled]):
            self._storage.write(row, self._end - length, before.part(row, end - length, end))

    def _rows_changed(self) -> None:
        """Tell the cache which rows there are and where they begin."""
        self._storage.attach(self._cache, len(self), self._end)
        self._start = self._end - torch.tensor(self.lengths)
        self._mask = (torch.arange(self._storage.capacity) >= self._start[:, None]).long()
        self._cache.start = self._start.int() if self._start.any() else None
        self._steps, self._unchanged = None, 0
