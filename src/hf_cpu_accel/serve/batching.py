"""Batches out of requests that come one by one: what waits is computed together, as soon as the model is free."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from hf_cpu_accel.serve.limits import Busy, Stopping, TooLong

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class BatchFacts:
    """One batch that was computed: its rows, the tokens in them, with padding, and how long it took in seconds."""

    rows: int
    tokens: int
    padded_tokens: int
    seconds: float


@dataclass(eq=False)
class _Waiting(Generic[Item, Answer]):
    item: Item
    size: int
    turn: float
    request: int
    future: Future[Answer]


@dataclass
class _Pace:
    """Of one worker's last batch: its rows, and when it ended."""

    rows: int = 0
    end: float = 0.0


class Batcher(Generic[Item, Answer]):
    """Calls `run` in threads of its own, with items that were submitted from any threads.

    A batch has items of similar size, at most `max_tokens` tokens once each is as long as the longest, and the item whose turn it
    is. Turns are by tokens: the second text of a request comes as many tokens behind its first as that one has,
    so a request with one text is not behind all of one with a thousand (fair queueing by virtual time, Demers et al. 1989).

    When the model is idle, an item is computed at once. Clients that have just got an answer often ask again within milliseconds:
    so for `max_wait` after a batch, the next one waits until it has as many items as that had.

    With several workers, what waits is shared out among those that are free: two batches on a core each are done sooner than one
    batch on two cores, whose threads wait for each other in every layer. A worker that is alone has all cores.

    Args:
        run: gives the answers to a list of items, in order. If it raises, each item is tried alone, so that only those which cannot
            be computed get the exception.
        workers: how many batches are computed at a time.
        max_tokens: of a batch; an item that has more by itself is computed alone.
        max_wait: seconds.
        max_waiting: items.
        prepare: is called in a worker's thread with the number of workers that compute, its own among them: first with 1, then
            before each batch for which it has changed.
        on_batch: is told about each batch, in the thread.
        name: of the threads.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Sequence[Answer]],
        *,
        workers: int = 1,
        max_tokens: int = 2048,
        max_wait: float = 0.002,
        max_waiting: int = 4096,
        prepare: Callable[[int], object] | None = None,
        on_batch: Callable[[BatchFacts], object] | None = None,
        name: str = "batcher",
    ) -> None:
        for argument, value in (
            ("workers", workers),
            ("max_tokens", max_tokens),
            ("max_waiting", max_waiting),
        ):
            if value < 1:
                raise ValueError(f"{argument}={value}: expected a whole number from 1")
        if not 0 <= max_wait < 60:
            raise ValueError(f"max_wait={max_wait}: expected seconds, from 0 and below 60")
        self.max_tokens, self.max_wait, self.max_waiting = max_tokens, max_wait, max_waiting
        self._run, self._prepare, self._on_batch = run, prepare, on_batch
        self._changed = threading.Condition()
        self._waiting: list[_Waiting[Item, Answer]] = []
        self._requests, self._turn = 0, 0.0
        self._computing, self._closed = 0, False
        self._workers = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(workers)]
        for worker in self._workers:
            worker.start()
        atexit.register(self.close, 5.0)  # a thread that Python ends for us may be in the middle of a kernel

    def submit(self, items: Sequence[Item], sizes: Sequence[int]) -> list[Future[Answer]]:
        """Queue the items of one request, all or none; `sizes` are their tokens.

        Cancelling a future takes its item out of the queue.

        Raises:
            Busy: there is no place for them now.
            TooLong: there never is.
            Stopping: after `close`.
        """
        if len(items) > self.max_waiting:
            raise TooLong(f"{len(items)} inputs in one request: at most {self.max_waiting} can wait")
        with self._changed:
            if self._closed:
                raise Stopping("the service is stopping")
            if len(self._waiting) + len(items) > self.max_waiting:
                self._drop_cancelled()
            if (waiting := len(self._waiting)) + len(items) > self.max_waiting:
                raise Busy(f"{waiting} inputs are waiting, of {self.max_waiting} that can: try again later")
            futures: list[Future[Answer]] = []
            turn = self._turn
            self._requests += 1
            for item, size in zip(items, sizes, strict=True):
                futures.append(Future())
                self._waiting.append(_Waiting(item, size, turn, self._requests, futures[-1]))
                turn += size
            self._changed.notify(len(items))
        return futures

    @property
    def waiting(self) -> int:
        """Items in the queue, without those that are computed at the moment."""
        return len(self._waiting)

    def close(self, timeout: float | None = None) -> bool:
        """Take nothing new, and wait until what was submitted is answered; False if that took longer than `timeout` seconds."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = None if timeout is None else time.monotonic() + timeout
        for worker in self._workers:
            worker.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(worker.is_alive() for worker in self._workers)

    def _work(self) -> None:
        pace, prepared = _Pace(), 1
        if self._prepare is not None:
            self._prepare(prepared)
        while (batch := self._next_batch(pace)) is not None:
            with self._changed:
                # Another one begins with what is left.
                computing = min(len(self._workers), self._computing + bool(self._waiting))
            if self._prepare is not None and computing != prepared:
                self._prepare(prepared := computing)
            begun = [waiting for waiting in batch if waiting.future.set_running_or_notify_cancel()]
            if begun:
                self._compute(begun, pace)
            with self._changed:
                self._computing -= 1

    def _next_batch(self, pace: _Pace) -> list[_Waiting[Item, Answer]] | None:
        """What this worker computes from now on; None at the end."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            self._wait_for_company(pace)
            self._drop_cancelled()
            self._computing += 1
            if not self._waiting:
                return []
            ordered = sorted(self._waiting, key=lambda waiting: waiting.size)
            oldest = min(self._waiting, key=lambda waiting: (waiting.turn, waiting.request))
            free = len(self._workers) - self._computing + 1
            rows = -(-len(ordered) // free)
            first, last = neighbors([w.size for w in ordered], ordered.index(oldest), self.max_tokens, rows)
            batch = ordered[first : last + 1]
            # What each request would have got by now if they had taken turns token by token.
            share = sum(waiting.size for waiting in batch) / len({waiting.request for waiting in ordered})
            self._turn = max(self._turn, oldest.turn) + share
            chosen = set(map(id, batch))
            self._waiting = [waiting for waiting in self._waiting if id(waiting) not in chosen]
            self._changed.notify(len(self._waiting))
            return batch

    def _wait_for_company(self, pace: _Pace) -> None:
        deadline = pace.end + self.max_wait
        while len(self._waiting) < pace.rows and not self._closed:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left)

    def _drop_cancelled(self) -> None:
        self._waiting = [waiting for waiting in self._waiting if not waiting.future.cancelled()]

    def _compute(self, batch: list[_Waiting[Item, Answer]], pace: _Pace) -> None:
        start = time.monotonic()
        try:
            answers = self._run([waiting.item for waiting in batch])
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(answers)} answers to {len(batch)} inputs")
        except BaseException as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
            else:
                for waiting in batch:
                    self._compute([waiting], pace)
            return
        end = time.monotonic()
        pace.rows, pace.end = len(batch), end
        for waiting, answer in zip(batch, answers, strict=True):
            waiting.future.set_result(answer)
        if self._on_batch is not None:
            sizes = [waiting.size for waiting in batch]
            self._on_batch(BatchFacts(len(batch), sum(sizes), len(sizes) * max(sizes), end - start))


def neighbors(sizes: Sequence[int], middle: int, limit: int, most: int) -> tuple[int, int]:
    """First and last index of the widest run around `middle`: at most `most`, and `limit` tokens when padded to its longest.

    Args:
        sizes: in ascending order. Shorter ones cost the padding, longer ones the padding of all: those nearest in size come first.
    """
    first = last = middle
    while True:
        down = sizes[last] - sizes[first - 1] if first else None
        up = sizes[last + 1] - sizes[last] if last + 1 < len(sizes) else None
        rows = last - first + 2
        fits_down = down is not None and rows <= most and rows * sizes[last] <= limit
        fits_up = up is not None and rows <= most and rows * sizes[last + 1] <= limit
        if fits_up and (not fits_down or up <= down):  # type: ignore[operator]
            last += 1
        elif fits_down:
            first -= 1
        else:
            return first, last
