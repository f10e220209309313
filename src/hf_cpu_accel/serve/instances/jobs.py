"""The bounded queue of jobs, and the limit on instances that compute at the same time."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hf_cpu_accel.serve.instances.work import Request


@dataclass(frozen=True)
class Job:
    """A request and the future of its result."""

    request: Request
    future: Future[Any] = field(default_factory=Future)


class Jobs:
    """A queue, first in, first out. `put` blocks while `most` jobs are waiting; only the first `active` instances get jobs."""

    def __init__(self, most: int, active: int) -> None:
        self._most, self._active = most, active
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self.closed = False

    def put(self, job: Job) -> None:
        """Append a job; wait while the queue is full.

        Raises:
            RuntimeError: the pool is closed.
        """
        with self._changed:
            while len(self._waiting) >= self._most and not self.closed:
                self._changed.wait()
            if self.closed:
                raise RuntimeError("this InstancePool is closed: create another one")
            self._waiting.append(job)
            self._changed.notify_all()

    def take(self, instance: int, patience: float) -> Job | None:
        """Remove and return the next job for instance number `instance`; None after `patience` seconds, or if `drained`."""
        until = time.monotonic() + patience
        with self._changed:
            while not self._waiting or instance >= self._active:
                left = until - time.monotonic()
                if left <= 0 or self.drained:
                    return None
                self._changed.wait(left)
            job = self._waiting.popleft()
            self._changed.notify_all()
            return job

    def set_active(self, active: int) -> None:
        """Set the number of instances that get jobs; running jobs of others continue."""
        with self._changed:
            self._active = active
            self._changed.notify_all()

    def close(self, cancel: bool) -> None:
        """Accept no more jobs; with `cancel`, cancel the waiting ones."""
        with self._changed:
            self.closed = True
            dropped = list(self._waiting) if cancel else []
            if cancel:
                self._waiting.clear()
            self._changed.notify_all()
        for job in dropped:
            job.future.cancel()

    @property
    def drained(self) -> bool:
        """Return whether the queue is closed and empty."""
        return self.closed and not self._waiting
