"""The thread that runs the jobs of one instance."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from hf_cpu_accel.serve.instances.jobs import Job, Jobs
from hf_cpu_accel.serve.instances.placement import Place
from hf_cpu_accel.serve.instances.work import Request

_TICK = 1.0  # seconds between two checks of an idle instance


class Instance(Protocol):
    """A thread or a process that computes; one thread calls its methods."""

    @property
    def pid(self) -> int | None: ...
    def move(self, place: Place, pin: bool) -> None: ...
    def run(self, request: Request) -> Any: ...
    def heal(self) -> None: ...
    def close(self) -> None: ...


class Worker(threading.Thread):
    """Run jobs until the queue is closed and empty."""

    def __init__(self, number: int, jobs: Jobs, instance: Instance, place: Place, pin: bool) -> None:
        super().__init__(name=f"InstancePool-{number}", daemon=True)
        self.number, self.instance = number, instance
        self.target = place  # set by the pool: the place of the next job
        self.ready = threading.Event()
        self._jobs, self._pin = jobs, pin
        self._place: Place | None = None

    def run(self) -> None:
        self._maintain()
        self.ready.set()
        while not self._jobs.drained:
            job = self._jobs.take(self.number, _TICK)
            self._maintain()
            if job is not None:
                self._run_job(job)
            del job  # an idle instance must not keep tensors alive
        self.instance.close()

    def _maintain(self) -> None:
        """Move the instance to its target place, and replace it if it has died. After an error the next tick tries again."""
        try:
            if self._place != self.target:
                target = self.target
                self.instance.move(target, self._pin)
                self._place = target
            self.instance.heal()
        except Exception:
            return  # the next job raises the error

    def _run_job(self, job: Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            result = self.instance.run(job.request)
        except BaseException as error:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)
