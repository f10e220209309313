"""The thread of this process that feeds one instance."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from hf_cpu_accel.serve.instances.jobs import Job, Jobs
from hf_cpu_accel.serve.instances.placement import Place
from hf_cpu_accel.serve.instances.work import Request

_TICK = 1.0  # seconds after which an instance that waits is looked at


class Instance(Protocol):
    """A thread or a process that computes; its methods are called by one thread."""

    @property
    def pid(self) -> int | None: ...
    def move(self, place: Place, pin: bool) -> None: ...
    def run(self, request: Request) -> Any: ...
    def heal(self) -> None: ...
    def close(self) -> None: ...


class Worker(threading.Thread):
    """Takes job after job until the queue is closed and empty."""

    def __init__(self, number: int, jobs: Jobs, instance: Instance, place: Place, pin: bool) -> None:
        super().__init__(name=f"InstancePool-{number}", daemon=True)
        self.number, self.instance = number, instance
        self.wanted = place  # written by others: where to compute from the next job on
        self.ready = threading.Event()
        self._jobs, self._pin = jobs, pin
        self._place: Place | None = None

    def run(self) -> None:
        self._look_after()
        self.ready.set()
        while not self._jobs.drained:
            job = self._jobs.take(self.number, _TICK)
            self._look_after()
            if job is not None:
                self._do(job)
            del job  # an instance that waits keeps no tensors
        self.instance.close()

    def _look_after(self) -> None:
        """Go where the instance is wanted, and see that it lives. If that fails, it is tried again at the next tick."""
        try:
            if self._place != self.wanted:
                wanted = self.wanted
                self.instance.move(wanted, self._pin)
                self._place = wanted
            self.instance.heal()
        except Exception:
            return  # a job will say why

    def _do(self, job: Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            result = self.instance.run(job.request)
        except BaseException as error:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)
