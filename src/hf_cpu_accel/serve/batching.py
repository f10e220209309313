"""Dynamic batching: waiting inputs of all requests are computed in batches as soon as the model is free."""

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
    """A computed batch.

    Attributes:
        rows: number of items.
        tokens: tokens of the items without padding.
        padded_tokens: tokens with padding.
        seconds: time of the computation.
    """

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
    """The number of rows and the end time of the last batch of a worker."""

    rows: int = 0
    end: float = 0.0


class Batcher(Generic[Item, Answer]):
    """Run batches of items in worker threads; any thread may submit items.

    A batch contains the item whose turn it is and items of similar size, at most `max_tokens` tokens including padding. Turns are
    counted in tokens: each text of a request follows after the tokens of the texts before it. So a request with one text does not
    wait for all texts of a large request (fair queueing by virtual time, Demers et al. 1989).

    If the model is idle, an item runs at once. Clients often send the next request within milliseconds of an answer. So for up to
    `max_wait` seconds after a batch, the next one waits for as many items as the last one had.

    Several workers share the waiting items. Two batches on one core each finish sooner than one batch on two cores, whose threads
    wait for each other in each layer. A single busy worker uses all cores.

    Args:
        run: returns the answers to a list of items, in order. If it raises, each item runs alone, so that only the failing items
            get the exception.
        workers: number of batches that run at the same time.
        max_tokens: maximum tokens of a batch; a longer item runs alone.
        max_wait: maximum waiting time for further items in seconds.
        max_waiting: maximum number of waiting items.
        prepare: called in a worker thread with the number of busy workers including its own: first with 1, then before each batch
            for which the number has changed.
        on_batch: called in a worker thread after each batch.
        name: name of the threads.

    Raises:
        ValueError: a number outside of its limits.
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
            raise ValueError(f"max_wait={max_wait}: expected seconds from 0 to less than 60")
        self.max_tokens, self.max_wait, self.max_waiting = max_tokens, max_wait, max_waiting
        self._run, self._prepare, self._on_batch = run, prepare, on_batch
        self._changed = threading.Condition()
        self._waiting: list[_Waiting[Item, Answer]] = []
        self._requests, self._turn = 0, 0.0
        self._computing, self._closed = 0, False
        self._workers = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(workers)]
        for worker in self._workers:
            worker.start()
        atexit.register(self.close, 5.0)  # Python would stop a thread in the middle of a kernel

    def submit(self, items: Sequence[Item], sizes: Sequence[int]) -> list[Future[Answer]]:
        """Queue the items of one request, all or none. Cancelling a future removes its item from the queue.

        Args:
            items: the items.
            sizes: number of tokens of each item.

        Raises:
            Busy: the queue has no room at the moment.
            TooLong: the request has more items than the queue has room for.
            Stopping: after `close`.
        """
        if len(items) > self.max_waiting:
            raise TooLong(
                f"the request has {len(items)} inputs; at most {self.max_waiting} are accepted: split the request"
            )
        with self._changed:
            if self._closed:
                raise Stopping("the server is stopping; try again later")
            if len(self._waiting) + len(items) > self.max_waiting:
                self._drop_cancelled()
            if (waiting := len(self._waiting)) + len(items) > self.max_waiting:
                raise Busy(
                    f"the queue has no room for {len(items)} inputs: {waiting} are waiting, at most {self.max_waiting} may; "
                    "try again later"
                )
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
        """Return the number of items in the queue, without running ones."""
        return len(self._waiting)

    def close(self, timeout: float | None = None) -> bool:
        """Reject new items and finish the submitted ones; return False if that takes longer than `timeout` seconds."""
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
                # Another worker starts with the remaining items.
                computing = min(len(self._workers), self._computing + bool(self._waiting))
            if self._prepare is not None and computing != prepared:
                self._prepare(prepared := computing)
            running = [waiting for waiting in batch if waiting.future.set_running_or_notify_cancel()]
            if running:
                self._compute(running, pace)
            with self._changed:
                self._computing -= 1

    def _next_batch(self, pace: _Pace) -> list[_Waiting[Item, Answer]] | None:
        """Wait for the next batch of this worker; return None after `close`."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            self._wait_for_items(pace)
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
            # The tokens that each request would have got by now if they alternated token by token.
            share = sum(waiting.size for waiting in batch) / len({waiting.request for waiting in ordered})
            self._turn = max(self._turn, oldest.turn) + share
            chosen = set(map(id, batch))
            self._waiting = [waiting for waiting in self._waiting if id(waiting) not in chosen]
            self._changed.notify(len(self._waiting))
            return batch

    def _wait_for_items(self, pace: _Pace) -> None:
        """Wait for as many items as the last batch had, up to `max_wait` after its end."""
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
                raise RuntimeError(f"the model returned {len(answers)} answers to {len(batch)} inputs")
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
    """Return the first and the last index of the widest range around `middle` that makes a batch.

    Items nearest in size are added first: a shorter item costs its padding, a longer one the padding of all others.

    Args:
        sizes: sizes in ascending order.
        middle: index that the range contains.
        limit: maximum tokens of the batch including padding.
        most: maximum number of items.
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
