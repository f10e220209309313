"""The scheduler: each step computes a chunk of new prompts, then a token of each running sequence."""

from __future__ import annotations

import collections

from hf_cpu_accel.generate.speculation.request import SpeculationRequest
from hf_cpu_accel.serve.engine.batch import Batch
from hf_cpu_accel.serve.engine.choice import Choice, largest
from hf_cpu_accel.serve.engine.forward import Forward
from hf_cpu_accel.serve.engine.generation import FinishReason, Generation
from hf_cpu_accel.serve.engine.metrics import Metrics
from hf_cpu_accel.serve.engine.prefix_cache import BLOCK, PrefixCache
from hf_cpu_accel.serve.engine.storage import Part


class _Sequence:
    """A request with a row.

    Attributes:
        ids: the prompt and the new tokens.
        done: during prefill, the number of tokens whose keys and values are in `storage`.
    """

    def __init__(self, generation: Generation, forward: Forward) -> None:
        self.generation = generation
        self.ids = list(generation.request.input_ids)
        self.choice = Choice(generation.request)
        self.storage, self.cache = forward.new_row(len(self.ids))
        self.done = 0

    @property
    def missing(self) -> int:
        """Return the number of tokens of the prompt that are not computed yet."""
        return self.generation.prompt_tokens - self.done

    def read(self, first: int, last: int) -> Part:
        """Return views of the keys and values of the positions `first` to `last`."""
        return self.storage.part(0, first, last)


class Scheduler:
    """The scheduler of one thread; see `Engine` for the arguments.

    Attributes:
        metrics: the metrics so far.
        stopping: set by another thread to cancel all requests at the next step.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        rows: int,
        prefill_chunk: int,
        prefix_cache_bytes: int,
        speculates: bool = False,
    ) -> None:
        self.metrics = Metrics()
        self.stopping = False
        self._forward, self._rows, self._chunk = forward, rows, prefill_chunk
        self._speculates = speculates
        self._prefixes = PrefixCache(forward.layout, prefix_cache_bytes)
        self._prompts: collections.deque[_Sequence] = collections.deque()
        self._running: list[_Sequence] = []  # in the order of the rows of the batch
        self._batch = self._new_batch()

    @property
    def active(self) -> int:
        """Return the number of requests with a row."""
        return len(self._prompts) + len(self._running)

    @property
    def has_room(self) -> bool:
        """Return whether a row is free."""
        return self.active < self._rows

    @property
    def prefix_cache_bytes(self) -> int:
        """Return the size of the prefix cache in bytes."""
        return self._prefixes.bytes

    def admit(self, generation: Generation) -> None:
        """Start a request."""
        try:
            self._prompts.append(_Sequence(generation, self._forward))
        except Exception as error:
            self._end(generation, None, error)
        self.metrics.prompt_tokens += generation.prompt_tokens

    def advance(self) -> None:
        """Compute up to a chunk of prompts, then a token of each running sequence."""
        self._drop_cancelled()
        self._prefill()
        if self._running:
            self._decode()

    def drop(self, generation: Generation) -> None:
        """End a cancelled request."""
        self._end(generation, "cancelled")

    def fail_all(self, error: BaseException | None) -> None:
        """End all requests with an error, at the end of the thread."""
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
                self.drop(self._remove(row).generation)

    def _prefill(self) -> None:
        """Compute chunks of prompts in turns: after a chunk, a prompt moves to the end of the line."""
        budget = self._chunk
        while self._prompts and budget >= min(BLOCK, self._chunk, self._prompts[0].missing):
            sequence = self._prompts[0]  # it stays in the line, so that it counts as active
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
        """Compute up to `budget` tokens of a prompt, and after the last one the first new token; return the number of tokens."""
        prompt = sequence.ids
        self._copy_prefix(sequence)
        first, last = sequence.done, min(sequence.done + budget, len(prompt))
        logits = self._forward.extend(sequence.cache, prompt[first:last], first)
        sequence.done = last
        self._prefixes.add(prompt[:last], sequence.read)
        if last == len(prompt):
            token = largest(logits)[0] if sequence.choice.is_plain else sequence.choice(prompt, logits[0])
            if not self._append(sequence, token):
                self._batch.add(sequence.read(0, last))
                self._running.append(sequence)
                del sequence.storage, sequence.cache
        return last - first

    def _copy_prefix(self, sequence: _Sequence) -> None:
        """Copy the cached prefix of a prompt, except for the last token, whose logits are needed."""
        blocks = self._prefixes.match(sequence.ids[:-1])
        cached = len(blocks) * BLOCK
        if cached <= sequence.done:
            return
        start = sequence.done // BLOCK
        for number, block in enumerate(blocks[start:], start=start):
            sequence.storage.write(0, number * BLOCK, block.part)
        sequence.storage.attach(sequence.cache, 1, cached)
        self.metrics.prefix_tokens += cached - sequence.done
        sequence.generation.cached_tokens += cached - sequence.done
        sequence.done = cached

    def _decode(self) -> None:
        try:
            longest = self._running[0].generation.longest
            logits = self._batch.step([sequence.ids for sequence in self._running], longest)
        except Exception as error:  # unknown which sequence caused it, and what was written to the cache
            for sequence in self._running:
                self._end(sequence.generation, None, error)
            self._running, self._batch = [], self._new_batch()
            return
        plain = any(sequence.choice.is_plain for sequence in self._running)
        argmax = largest(logits) if plain else []
        for row in reversed(range(len(self._running))):
            sequence = self._running[row]
            try:
                token = (
                    argmax[row] if sequence.choice.is_plain else sequence.choice(sequence.ids, logits[row])
                )
            except Exception as error:
                self._end(self._remove(row).generation, None, error)
                continue
            if self._append(sequence, token):
                self._remove(row)

    def _append(self, sequence: _Sequence, token: int) -> bool:
        """Append a token and pass it to the client; return True if it is the last one."""
        generation, request = sequence.generation, sequence.generation.request
        sequence.ids.append(token)
        generation.put(token)
        self.metrics.generated_tokens += 1
        if token in request.ends:
            self._end(generation, "stop")
        elif len(sequence.ids) == generation.longest:
            self._end(generation, "length")
        return generation.done

    def _new_batch(self) -> Batch:
        speculation = SpeculationRequest.by_default(self.metrics.speculation) if self._speculates else None
        return Batch(self._forward, self._rows, speculation)

    def _remove(self, row: int) -> _Sequence:
        """Remove a row and add its sequence to the prefix cache; the last row moves to its place."""
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
