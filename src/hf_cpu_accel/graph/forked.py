"""Work that is shared out among processes, forked for it: they have all that this one has, and it sees what they write."""

from __future__ import annotations

import math
import mmap
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

_FORK = multiprocessing.get_context("fork")


def shared(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in memory that forked processes share. It is no file in /dev/shm, which containers keep small."""
    nbytes = math.prod(shape) * dtype.itemsize
    return (
        torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes].view(dtype).view(*shape)
    )


def share_out(work: Callable[[int], None], pieces: int, processes: int, done: Callable[[], object]) -> None:
    """Call `work` with each number below `pieces`, here and in `processes - 1` others; who is free takes the next.

    Each has its part of the threads that this thread computes on.

    Args:
        done: is called here, once for each piece, as they are finished, whoever finished it.

    Raises:
        RuntimeError: another process failed, with its traceback, or was killed. The others end early.
        BaseException: what `work` raised here.
    """
    if processes == 1:  # also where there are no semaphores for processes to count with
        for piece in range(pieces):
            work(piece)
            done()
        return
    counts = _Counts(pieces)
    others = [_Other(work, counts, processes) for _ in range(processes - 1)]
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // processes))
    told = 0

    def tell() -> None:
        nonlocal told
        while told < counts.finished.value:
            done()
            told += 1

    try:
        counts.run(work, tell)
        for other in others:
            other.end()
        tell()
    finally:
        torch.set_num_threads(threads)
        counts.stop()
        for other in others:
            other.process.join()


class _Counts:
    """Which piece is next, and how many are finished, for all processes."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self.next: Any = _FORK.Value("q", 0)
        self.finished: Any = _FORK.Value("q", 0)

    def run(self, work: Callable[[int], None], tell: Callable[[], object]) -> None:
        """Take pieces until there are none."""
        while True:
            with self.next.get_lock():
                piece = self.next.value
                self.next.value += 1
            if piece >= self.pieces:
                return
            work(piece)
            with self.finished.get_lock():
                self.finished.value += 1
            tell()

    def stop(self) -> None:
        """No process begins another piece after this."""
        # Without the lock, which a process may have held when it was killed.
        self.next.get_obj().value = self.pieces


class _Other:
    """A process that takes part."""

    def __init__(self, work: Callable[[int], None], counts: _Counts, processes: int) -> None:
        self._counts = counts
        self._errors, errors = _FORK.Pipe(duplex=False)
        self.process = _FORK.Process(target=_take_part, args=(work, counts, processes, errors), daemon=True)
        self.process.start()
        errors.close()

    def end(self) -> None:
        """Wait for it.

        Raises:
            RuntimeError: it failed.
        """
        try:
            error: str | None = self._errors.recv()
        except EOFError:
            self.process.join()
            error = f"it exited with code {self.process.exitcode}: killed, or out of memory"
        if error is not None:
            self._counts.stop()
            raise RuntimeError(
                f"process {self.process.pid}, which computed some of the nodes, failed: {error}"
            )


def _take_part(work: Callable[[int], None], counts: _Counts, processes: int, errors: Connection) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    try:
        counts.run(work, lambda: None)
    except BaseException:
        counts.stop()
        errors.send(traceback.format_exc())
    else:
        errors.send(None)
