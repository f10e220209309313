"""An instance as a thread of this process, for models that spend their time in kernels, which release the GIL."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import torch

from hf_cpu_accel.serve.instances.placement import Place
from hf_cpu_accel.serve.instances.work import Request, Work


class ThreadInstance:
    """Compute in the calling thread; threads that the kernels start inherit its CPUs."""

    pid = None

    def __init__(self, work: Work, default_threads: int) -> None:
        """
        Args:
            work: the model and its call.
            default_threads: number of torch threads for other threads of this process.
        """
        self._work, self._default_threads = work, default_threads

    def move(self, place: Place, pin: bool) -> None:
        """Move the calling thread to `place`."""
        use_place(place, pin)
        # New threads get the last number that was set in torch, so restore the default from another thread.
        reset = threading.Thread(target=torch.set_num_threads, args=(self._default_threads,))
        reset.start()
        reset.join()

    def run(self, request: Request) -> Any:
        """Run a request and return its result."""
        return self._work.run(request)

    def heal(self) -> None:
        """Do nothing: a thread ends only with its process."""

    def close(self) -> None:
        """Do nothing: the worker ends the thread."""


def use_place(place: Place, pin: bool) -> None:
    """Pin the calling thread, and set its number of torch threads.

    CPUs that the process has lost meanwhile (by a cpuset) cause no error: the next check of the limits finds another place.
    """
    if pin:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, place.cpus)
    torch.get_num_threads()  # the first call in a thread resets the number to that of the process
    torch.set_num_threads(place.threads)
