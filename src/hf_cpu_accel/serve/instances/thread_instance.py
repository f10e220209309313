"""An instance that is a thread of this process: for models whose time goes into kernels, which release the interpreter's lock."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import torch

from hf_cpu_accel.serve.instances.placement import Place
from hf_cpu_accel.serve.instances.work import Request, Work


class ThreadInstance:
    """Computes in the thread that calls it; threads that the kernels start there inherit its CPUs."""

    pid = None

    def __init__(self, work: Work, others: int) -> None:
        """`others`: the number of threads that torch is to use in threads of this process that are not ours."""
        self._work, self._others = work, others

    def move(self, place: Place, pin: bool) -> None:
        """From now on compute at `place`."""
        take(place, pin)
        # torch keeps the last number that was set for threads that have not computed yet: those of the user's.
        reset = threading.Thread(target=torch.set_num_threads, args=(self._others,))
        reset.start()
        reset.join()

    def run(self, request: Request) -> Any:
        return self._work.do(request)

    def heal(self) -> None:
        """A thread does not die alone."""

    def close(self) -> None:
        """The thread ends by itself."""


def take(place: Place, pin: bool) -> None:
    """Pin the calling thread, and set the number of threads that torch uses in it.

    CPUs that were taken from the process meanwhile (a cpuset) are no error: the next look at the limits finds a place that is left.
    """
    if pin:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, place.cpus)
    torch.get_num_threads()  # a thread's first question, which sets it to the process's number
    torch.set_num_threads(place.threads)
