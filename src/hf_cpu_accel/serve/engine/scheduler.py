"""What is computed next: a chunk of the prompts that have come, then a token of each sequence that goes on."""

from __future__ import annotations

import collections

from hf_cpu_accel.serve.engine.batch import Batch
from hf_cpu_accel.serve.engine.choice import Choice, largest
from hf_cpu_accel.serve.engine.forward import Forward
from hf_cpu_accel.serve.engine.generation import FinishReason, Generation
from hf_cpu_accel.serve.engine.metrics import Metrics
from hf_cpu_accel.serve.engine.prefix_cache import BLOCK, PrefixCache
from hf_cpu_accel.serve.engine.storage import Part


class _Sequence:
    """A request that has a row.

    Attributes:
        ids: the prompt and the new tokens.
        done: how many of them have keys and values in `storage`, as long as the prompt is being computed.
    """

    def __init__(self, generation: Generation, forward: Forward) -> None:
        self.generation = generation
        self.ids = list(generation.request.input_ids)
        self.choice = Choice(generation.request)
        self.storage, self.cache = forward.new_row(len(self.ids))
        self.done = 0

    @property
    def missing(self) -> int:
        """Tokens of the prompt that are to be computed."""
        return self.generation.prompt_tokens - self.done

    def read(self, first: int, last: int) -> Part:
        return self.storage.part(0, first, last)


class Scheduler:
    """Belongs to one thread; see `Engine` for the arguments.

    Attributes:
        metrics: what has been counted so far.
        stopping: set from outside: all are cancelled at the next step.
    """

    def __init__(self, forward: Forward, *, rows: int, prefill_chunk: int, prefix_cache_bytes: int) -> None:
        self.metrics = Metrics()
        self.stopping = False
        self._forward, self._rows, self._chunk = forward, rows, prefill_chunk
        self._prefixes = PrefixCache(forward.layout, prefix_cache_bytes)
        self._prompts: collections.deque[_Sequence] = collections.deque()
        self._running: list[_Sequence] = []  # in the order of the rows of the batch
        self._batch = Batch(forward, rows)

    @property
    def active(self) -> int:
        """How many requests have a row."""
        return len(self._prompts) + len(self._running)

    @property
    def has_room(self) -> bool:
        return self.active < self._rows

    @property
    def prefix_cache_bytes(self) -> int:
        return self._prefixes.bytes

    def admit(self, generation: Generation) -> None:
        """Begin with a request."""
        try:
            self._prompts.append(_Sequence(generation, self._forward))
        except Exception as error:
            self._end(generation, None, error)
        self.metrics.prompt_tokens += generation.prompt_tokens

    def advance(self) -> None:
        """Compute up to a chunk of prompts, and a token of each sequence."""
        self._drop_cancelled()
        self._prefill()
        if self._running:
            self._decode()

    def drop(self, generation: Generation) -> None:
        """A request whose client has left, wherever it was."""
        self._end(generation, "cancelled")

    def fail_all(self, error: BaseException | None) -> None:
        """The end of the thread: what is left will not be gone on with."""
        for sequence in (*self._prompts, *self._running):
            self._end(sequence.generation, None, error)
        self._prompts.clear()
        self._running.clear()

    def _drop_cancelled(self) -> None:
        for sequence in list(self._prompts):
            if self.stopping or sequence.generation.is_cancelled:
                self._prompts.remove(sequence)
                self.drop(sequence.generation)
        for row in reversed(range(len(self._running))):
            if self.stopping or self._running[row].generation.is_cancelled:
                self.drop(self._leave(row).generation)

    def _prefill(self) -> None:
        """In turns: who has had a chunk goes to the end of the line."""
        budget = self._chunk
        while self._prompts and budget >= min(BLOCK, self._chunk, self._prompts[0].missing):
            sequence = self._prompts[0]  # it stays in the line, and so among those that have a row
            try:
                budget -= self._prefill_chunk(sequence, budget)
            except Exception as error:
                self._end(sequence.generation, None, error)
                self._prompts.popleft()
                continue
            if sequence.missing:
                self._prompts.rotate(-1)
            else:
                self._prompts.popleft()

    def _prefill_chunk(self, sequence: _Sequence, budget: int) -> int:
        """Up to `budget` tokens of a prompt, and with the last one the first new token; returns how many were computed."""
        prompt = sequence.ids
        self._take_prefix(sequence)
        first, last = sequence.done, min(sequence.done + budget, len(prompt))
        logits = self._forward.extend(sequence.cache, prompt[first:last], first)
        sequence.done = last
        self._prefixes.add(prompt[:last], sequence.read)
        if last == len(prompt):
            token = largest(logits)[0] if sequence.choice.is_plain else sequence.choice(prompt, logits[0])
            if not self._hand_out(sequence, token):
                self._batch.add(sequence.read(0, last))
                self._running.append(sequence)
                del sequence.storage, sequence.cache
        return last - first

    def _take_prefix(self, sequence: _Sequence) -> None:
        """What others have computed already, or since the last chunk. The last token is left: its logits are wanted."""
        blocks = self._prefixes.match(sequence.ids[:-1])
        found = len(blocks) * BLOCK
        if found <= sequence.done:
            return
        begun = sequence.done // BLOCK
        for number, block in enumerate(blocks[begun:], start=begun):
            sequence.storage.write(0, number * BLOCK, block.part)
        sequence.storage.attach(sequence.cache, 1, found)
        self.metrics.prefix_tokens += found - sequence.done
        sequence.generation.cached_tokens += found - sequence.done
        sequence.done = found

    def _decode(self) -> None:
        try:
            logits = self._batch.step([sequence.ids[-1] for sequence in self._running])
        except Exception as error:  # it is not known whose fault it is, or what was written
            for sequence in self._running:
                self._end(sequence.generation, None, error)
            self._running, self._batch = [], Batch(self._forward, self._rows)
            return
        plain = any(sequence.choice.is_plain for sequence in self._running)
        chosen = largest(logits) if plain else []
        for row in reversed(range(len(self._running))):
            sequence = self._running[row]
            try:
                token = (
                    chosen[row] if sequence.choice.is_plain else sequence.choice(sequence.ids, logits[row])
                )
            except Exception as error:
                self._end(self._leave(row).generation, None, error)
                continue
            if self._hand_out(sequence, token):
                self._leave(row)

    def _hand_out(self, sequence: _Sequence, token: int) -> bool:
        """Whether this was the last token."""
        generation, request = sequence.generation, sequence.generation.request
        sequence.ids.append(token)
        generation.put(token)
        self.metrics.generated_tokens += 1
        if token in request.ends:
            self._end(generation, "stop")
        elif len(sequence.ids) == generation.prompt_tokens + request.max_new_tokens:
            self._end(generation, "length")
        return generation.done

    def _leave(self, row: int) -> _Sequence:
        """Keep what the sequence has for others that begin so; the last row takes its place."""
        sequence, batch = self._running[row], self._batch
        length = batch.lengths[row]
        self._prefixes.add(sequence.ids[:length], lambda first, last: batch.read(row, first, last))
        batch.remove(row)
        self._running[row] = self._running[-1]
        self._running.pop()
        return sequence

    def _end(
        self, generation: Generation, reason: FinishReason | None, error: BaseException | None = None
    ) -> None:
        if reason is None:
            self.metrics.failed += 1
        elif reason == "cancelled":
            self.metrics.cancelled += 1
        else:
            self.metrics.completed += 1
        generation.finish(reason, error)
