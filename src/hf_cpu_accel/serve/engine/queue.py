"""The queue of requests that wait for a row, first in, first out."""

from __future__ import annotations

import threading

from hf_cpu_accel.serve.engine.generation import Generation
from hf_cpu_accel.serve.limits import Busy, Stopping


class Queue:
    """The queue between the threads of clients and the thread that computes.

    Args:
        limit: maximum number of waiting requests.

    Attributes:
        accepted: number of accepted requests so far.
    """

    def __init__(self, limit: int) -> None:
        self.accepted = 0
        self._limit = limit
        self._waiting: list[Generation] = []
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, generation: Generation) -> None:
        """Append a request.

        Raises:
            Busy: the queue is full.
            Stopping: after `close`.
        """
        with self._changed:
            if self._closed:
                raise Stopping("the engine is closed: it accepts no more requests; create another one")
            if sum(not waiting.is_cancelled for waiting in self._waiting) >= self._limit:
                raise Busy(
                    f"the queue is full: {self._limit} requests are waiting, which is the limit; try again later"
                )
            self.accepted += 1
            self._waiting.append(generation)
            self._changed.notify()

    def wait(self, *, busy: bool) -> bool:
        """Wait for a request, or return at once if the computing thread is `busy`; return False if no request can come."""
        with self._changed:
            self._changed.wait_for(lambda: busy or self._waiting or self._closed)
            return busy or bool(self._waiting)

    def take(self) -> Generation | None:
        """Remove and return the first request; None if the queue is empty."""
        with self._changed:
            return self._waiting.pop(0) if self._waiting else None

    def take_cancelled(self, *, everything: bool = False) -> list[Generation]:
        """Remove and return the cancelled requests, or with `everything` all requests."""
        with self._changed:
            removed = [waiting for waiting in self._waiting if everything or waiting.is_cancelled]
            self._waiting = [waiting for waiting in self._waiting if waiting not in removed]
            return removed

    def close(self) -> None:
        """Reject further requests; `wait` returns False once the queue is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify()
