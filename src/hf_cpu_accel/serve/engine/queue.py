"""The requests that wait for a row, first come, first served."""

from __future__ import annotations

import threading

from hf_cpu_accel.serve.engine.generation import Generation
from hf_cpu_accel.serve.limits import Busy, Stopping


class Queue:
    """Between the threads of clients and the one that computes.

    Args:
        limit: how many may wait.

    Attributes:
        accepted: how many were put in so far.
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
        """
        Raises:
            Busy: so many are waiting.
            Stopping: after `close`.
        """
        with self._changed:
            if self._closed:
                raise Stopping("the engine is being closed, and takes no more requests")
            if sum(not waiting.is_cancelled for waiting in self._waiting) >= self._limit:
                raise Busy(f"{self._limit} requests are waiting already, which is the limit: try again later")
            self.accepted += 1
            self._waiting.append(generation)
            self._changed.notify()

    def wait(self, *, busy: bool) -> bool:
        """Wait for a request, not if the computing thread is `busy` anyway; False if there will be none any more."""
        with self._changed:
            self._changed.wait_for(lambda: busy or self._waiting or self._closed)
            return busy or bool(self._waiting)

    def take(self) -> Generation | None:
        with self._changed:
            return self._waiting.pop(0) if self._waiting else None

    def take_cancelled(self, *, everything: bool = False) -> list[Generation]:
        """Those whose clients have left; `everything`: all."""
        with self._changed:
            taken = [waiting for waiting in self._waiting if everything or waiting.is_cancelled]
            self._waiting = [waiting for waiting in self._waiting if waiting not in taken]
            return taken

    def close(self) -> None:
        """Let `put` refuse, and `wait` say so once the queue is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify()
