"""Safe forks: a forked process has only one thread of its parent, and a copy of its memory.

Two things would hang in the child:

- GNU's OpenMP, which torch's packages for Linux use, passes work to threads of the parent. torch hangs in the child of a process
  that has computed on two threads, with or without this package. So the OpenMP threads of the forking thread are ended before a
  fork. The next parallel region starts new ones, in both processes, in about 100 us.
- A lock that another thread held is never released. The locks of this package are free in the child.

Other OpenMP runtimes (LLVM's, Intel's) handle forks themselves.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hf_cpu_accel.runtime.files import read_text

_SOFT = 1  # omp_pause_soft of <omp.h>: settings such as the number of threads stay
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_threads = 1


def new_lock() -> threading.Lock:
    """Return a lock that is free in a forked process."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def new_reentrant_lock() -> threading.RLock:
    """Return a reentrant lock that is free in a forked process."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _before() -> None:
    global _threads
    _threads = torch.get_num_threads()
    for pause in _runtimes():
        pause(_SOFT)  # refused inside of a parallel region, in which no process forks


def _in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()
    _keep_threads()


def _keep_threads() -> None:
    if torch.get_num_threads() != _threads:
        torch.set_num_threads(_threads)


@cache
def _runtimes(root: Path = Path("/")) -> tuple[Callable[[int], int], ...]:
    """Return `omp_pause_resource_all` of each GNU OpenMP runtime in this process, without loading one."""
    maps = read_text(root / "proc/self/maps") or ""
    found = []
    for path in sorted(set(re.findall(r"/\S*libgomp[-.]\S*", maps))):
        try:
            found.append(ctypes.CDLL(path, mode=os.RTLD_NOLOAD).omp_pause_resource_all)
        except (OSError, AttributeError):  # not to be found again, or from before OpenMP 5
            continue
    return tuple(found)


os.register_at_fork(before=_before, after_in_parent=_keep_threads, after_in_child=_in_child)
