"""Work divided among forked processes, which have the memory of this process and write results to shared memory."""

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
    """Return zeros in memory that forked processes share. Not a file in /dev/shm, which is small in containers."""
    nbytes = math.prod(shape) * dtype.itemsize
    return (
        torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes].view(dtype).view(*shape)
    )


def share_out(work: Callable[[int], None], pieces: int, processes: int, done: Callable[[], object]) -> None:
    """Call `work` with each number below `pieces`, in this process and `processes - 1` forked ones. Each takes the next free
    number.

    The processes divide the threads of this thread among them.

    Args:
        work: called with the number of a piece.
        pieces: the number of pieces.
        processes: the number of processes, including this one.
        done: called in this process once for each finished piece.

    Raises:
        RuntimeError: another process failed or was killed; the message has its traceback. The others stop early.
        BaseException: any exception that `work` raises in this process.
    """
    if processes == 1:  # also where there are no semaphores for processes to count with
        for piece in range(pieces):
            work(piece)
            done()
        return
    counts = _Counts(pieces)
    workers = [_Worker(work, counts, processes) for _ in range(processes - 1)]
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // processes))
    reported = 0

    def report() -> None:
        nonlocal reported
        while reported < counts.finished.value:
            done()
            reported += 1

    try:
        counts.run(work, report)
        for worker in workers:
            worker.wait()
        report()
    finally:
        torch.set_num_threads(threads)
        counts.stop()
        for worker in workers:
            worker.process.join()


class _Counts:
    """The number of the next piece and the number of finished ones, shared by all processes."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self.next: Any = _FORK.Value("q", 0)
        self.finished: Any = _FORK.Value("q", 0)

    def run(self, work: Callable[[int], None], report: Callable[[], object]) -> None:
        """Work on pieces until none is left."""
        while True:
            with self.next.get_lock():
                piece = self.next.value
                self.next.value += 1
            if piece >= self.pieces:
                return
            work(piece)
            with self.finished.get_lock():
                self.finished.value += 1
            report()

    def stop(self) -> None:
        """Let no process start another piece."""
        # Without the lock, which a process may have held when it was killed.
        self.next.get_obj().value = self.pieces


class _Worker:
    """A forked process that works on pieces."""

    def __init__(self, work: Callable[[int], None], counts: _Counts, processes: int) -> None:
        self._counts = counts
        self._errors, errors = _FORK.Pipe(duplex=False)
        self.process = _FORK.Process(target=_take_part, args=(work, counts, processes, errors), daemon=True)
        self.process.start()
        errors.close()

    def wait(self) -> None:
        """Wait for the end of the process.

        Raises:
            RuntimeError: the process failed.
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
