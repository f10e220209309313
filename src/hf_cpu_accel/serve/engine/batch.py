"""The decode batch: sequences in one KV cache, which they join and leave; each step appends one token to each sequence.

All sequences end at one position of the cache, so a step writes one column and is one call of the op over all layers. A shorter
sequence starts later; the positions before it are left padding, which is not computed or read. Keys contain the position in their
own sequence, so a sequence can be moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.generate.cache_layer import bucket
from hf_cpu_accel.generate.replay.steps import DecodeSteps
from hf_cpu_accel.generate.speculation.request import SpeculationRequest
from hf_cpu_accel.generate.speculation.steps import SpeculativeSteps
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
        speculation: how to draft tokens of a sequence that is alone, or None.

    Attributes:
        lengths: number of tokens of each row.
    """

    def __init__(self, forward: Forward, most: int, speculation: SpeculationRequest | None = None) -> None:
        self._forward, self._most, self._speculation = forward, most, speculation
        self._cache = forward.new_cache()
        self._storage = Storage(forward.layout, 1, 0)
        self._end = 0  # position after the last token of all rows
        self.lengths: list[int] = []
        self._start = self._mask = torch.zeros(0, dtype=torch.long)
        self._steps: DecodeSteps | None = None  # until the rows change
        self._unchanged = 0  # steps since the rows changed
        self._alone: _Alone | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, part: Part) -> None:
        """Append a row with these keys and values."""
        self._end_alone()
        length = part[0].shape[2]
        self.lengths.append(length)
        if len(self) > self._storage.rows or length > self._end:
            self._rebuild(len(self) - 1)
        self._storage.write(len(self) - 1, self._end - length, part)
        self._rows_changed()

    def remove(self, row: int) -> None:
        """Remove a row; the last row moves to its place."""
        self._end_alone()
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

    def step(self, texts: Sequence[Sequence[int]], longest: int = 0) -> Tensor:
        """Append the last token of each text to its row and return the logits, float32 [rows, vocabulary].

        Args:
            texts: the tokens of each row, which has all but the last one.
            longest: the maximum number of tokens of a text that is alone.
        """
        if self._alone is None and len(texts) == 1 and longest and self._unchanged == _UNCHANGED:
            self._alone = self._begin_alone(texts[0], longest)
        if self._alone is not None:
            return self._advance(self._alone.step(texts[0][-1]))
        self.make_room(1)
        ids = torch.tensor([text[-1] for text in texts])[:, None]
        positions = self._end - self._start[:, None]
        if self._steps is None and self._unchanged >= _UNCHANGED:
            self._steps = self._forward.steps(self._cache, self._end)
        self._unchanged += 1
        return self._advance(
            self._forward(ids, positions, self._mask[:, : self._end + 1], self._cache, self._steps)
        )

    def make_room(self, new_tokens: int) -> None:
        """Move to a larger storage if so many more tokens do not fit."""
        if self._end + new_tokens > self._storage.capacity:
            self._rebuild(len(self), new_tokens)
            self._rows_changed()

    def inputs(self, ids: Tensor, new_tokens: int) -> dict[str, Any]:
        """Return the inputs of the model for the last columns of `ids`, int64 [1, tokens], of a sequence that is alone."""
        length = ids.shape[1]
        start = self._end - self.lengths[0]
        positions = torch.arange(length - new_tokens, length)[None]
        mask = self._mask[:, : start + length]
        return self._forward.inputs(ids[:, -new_tokens:], positions, mask, self._cache, new_tokens)

    def _advance(self, logits: Tensor) -> Tensor:
        """Count the tokens that have these logits."""
        self._end += 1
        self.lengths = [length + 1 for length in self.lengths]
        return logits

    def _begin_alone(self, text: Sequence[int], longest: int) -> _Alone | None:
        if self._speculation is None:
            return None
        known, inputs = torch.tensor([text[:-1]]), _AloneInputs(self, self._cache)
        steps = self._speculation.steps(self._forward.model, inputs, known, None, longest)
        return None if steps is None else _Alone(steps, known, longest)

    def _end_alone(self) -> None:
        """Take back drafts before other sequences come, or this one leaves."""
        if self._alone is not None:
            self._alone.steps.close()
            self._alone = None

    def _rebuild(self, rows_to_copy: int, new_tokens: int = 1) -> None:
        """Move to a larger storage, copying the first rows."""
        old, end = self._storage, self._end
        rows = old.rows
        while rows < len(self):
            rows = min(2 * rows, self._most)
        self._end = max(self.lengths)
        self._storage = Storage(self._forward.layout, rows, bucket(self._end + new_tokens - 1))
        for row, length in enumerate(self.lengths[:rows_to_copy]):
            self._storage.write(row, self._end - length, old.part(row, end - length, end))

    def _rows_changed(self) -> None:
        """Update the cache and the mask after a change of the rows."""
        self._storage.attach(self._cache, len(self), self._end)
        self._start = self._end - torch.tensor(self.lengths)
        self._mask = (torch.arange(self._storage.capacity) >= self._start[:, None]).long()
        self._cache.start = self._start.int() if self._start.any() else None
        self._steps, self._unchanged = None, 0


class _Alone:
    """The steps of a sequence that is alone.

    Args:
        steps: which draft tokens.
        known: the text so far, int64 [1, tokens].
        longest: the maximum number of tokens.
    """

    def __init__(self, steps: SpeculativeSteps, known: Tensor, longest: int) -> None:
        self.steps, self._length = steps, known.shape[1]
        self._ids = torch.cat([known, known.new_empty(1, longest - self._length)], dim=1)

    def step(self, token: int) -> Tensor:
        """Append a token and return the logits of the next one, float32 [1, vocabulary]."""
        self._ids[0, self._length] = token
        self._length += 1
        return self.steps(self._ids[:, : self._length]).float()


class _AloneInputs:
    """The inputs of the model for a sequence that is alone in its batch; see `StepInputs`."""

    def __init__(self, batch: Batch, cache: CPUCache) -> None:
        self._batch, self.cache = batch, cache

    def after(self, ids: Tensor, new_tokens: int = 1) -> dict[str, Any]:
        self._batch.make_room(new_tokens)
        return self._batch.inputs(ids, new_tokens)

    def go_on_with(self, outputs: Any) -> None:
        """The cache stays the same."""
