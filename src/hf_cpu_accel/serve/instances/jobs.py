"""The queue between those who ask and the instances: bounded, and served by as many instances as may compute at a time."""

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
    """What is asked for, and who waits for it."""

    request: Request
    future: Future[Any] = field(default_factory=Future)


class Jobs:
    """First come, first served; `put` waits while `most` jobs are waiting."""

    def __init__(self, most: int, active: int) -> None:
        self._most, self._active = most, active
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self.closed = False

    def put(self, job: Job) -> None:
        """
        Raises:
            RuntimeError: the pool is closed.
        """
        with self._changed:
            while len(self._waiting) >= self._most and not self.closed:
                self._changed.wait()
            if self.closed:
                raise RuntimeError("this InstancePool is closed: make another one")
            self._waiting.append(job)
            self._changed.notify_all()

    def take(self, instance: int, patience: float) -> Job | None:
        """The next job for instance number `instance`; None after `patience` seconds, or at the end (`drained`)."""
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
        """From now on the first `active` instances take jobs; those that others have taken go on."""
        with self._changed:
            self._active = active
            self._changed.notify_all()

    def close(self, cancel: bool) -> None:
        """Take no more; with `cancel`, who waits is told so."""
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
        return self.closed and not self._waiting
