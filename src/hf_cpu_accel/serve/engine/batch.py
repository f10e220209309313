"""The decode batch: sequences in one KV cache, which they join and leave; each step appends one token to each sequence.

All sequences end at one position of the cache, so a step writes one column and is one call of the op over all layers. A shorter
sequence starts later; the positions before it are left padding, which is not computed or read. Keys contain the position in their
own sequence, so a sequence can be moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cpu_accel.generate.cache_layer import bucket
from hf_cpu_accel.generate.replay.steps import DecodeSteps
from hf_cpu_accel.serve.engine.forward import Forward
from hf_cpu_accel.serve.engine.storage import Part, Storage

_UNCHANGED = (
    4  # steps with unchanged rows before steps are captured; capturing does not pay if rows change often
)


class Batch:
    """Rows of a KV cache; each row is a sequence with its own length.

    Args:
        forward: the calls of the model.
        most: maximum number of rows.

    Attributes:
        lengths: number of tokens of each row.
    """

    def __init__(self, forward: Forward, most: int) -> None:
        self._forward, self._most = forward, most
        self._cache = forward.new_cache()
        self._storage = Storage(forward.layout, 1, 0)
        self._end = 0  # position after the last token of all rows
        self.lengths: list[int] = []
        self._start = self._mask = torch.zeros(0, dtype=torch.long)
        self._steps: DecodeSteps | None = None  # until the rows change
        self._unchanged = 0  # steps since the rows changed

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, part: Part) -> None:
        """Append a row with these keys and values."""
        length = part[0].shape[2]
        self.lengths.append(length)
        if len(self) > self._storage.rows or length > self._end:
            self._rebuild(len(self) - 1)
        self._storage.write(len(self) - 1, self._end - length, part)
        self._rows_changed()

    def remove(self, row: int) -> None:
        """Remove a row; the last row moves to its place."""
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
        """Return views of the keys and values of the positions `first` to `last` of a row."""
        start = self._end - self.lengths[row]
        return self._storage.part(row, start + first, start + last)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to each row and return the logits, float32 [rows, vocabulary]."""
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

    def _rebuild(self, rows_to_copy: int) -> None:
        """Move to a larger storage, copying the first rows."""
        old, end = self._storage, self._end
        rows = old.rows
        while rows < len(self):
            rows = min(2 * rows, self._most)
        self._end = max(self.lengths)
        self._storage = Storage(self._forward.layout, rows, bucket(self._end))
        for row, length in enumerate(self.lengths[:rows_to_copy]):
            self._storage.write(row, self._end - length, old.part(row, end - length, end))

    def _rows_changed(self) -> None:
        """Update the cache and the mask after a change of the rows."""
        self._storage.attach(self._cache, len(self), self._end)
        self._start = self._end - torch.tensor(self.lengths)
        self._mask = (torch.arange(self._storage.capacity) >= self._start[:, None]).long()
        self._cache.start = self._start.int() if self._start.any() else None
        self._steps, self._unchanged = None, 0
