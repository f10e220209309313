"""Collective operations of a process group, through shared memory on one machine, else by gloo.

gloo uses sockets and sleeping threads: a hidden state of 3.5 KB takes 0.1 to 1.4 ms between two processes of a virtual machine, and
a token of a language model needs two sums per layer. Here a process writes its values, then a counter, and polls the counters of
the others, which takes some microseconds. Each process sums in the same order, so all results are bit-identical.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

_CAPACITY = 1 << 20  # floats of each process; more go by gloo
_LINE = 64  # bytes, so that no two processes write to one line of a cache
_AWAKE = 2000  # looks at what another has written; between further ones other programs may run
_PATIENT = 20000  # after so many, and so many again, it is asked whether the other is alive


class Exchange:
    """The exchange of one group. All its processes must create it at the same time, and call it in the same order.

    Attributes:
        is_shared: whether it uses shared memory, which needs one machine with ordered stores (x86).
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._turn = group, 0
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        nbytes = self.size * (_LINE + 2 * _CAPACITY * 4)
        memory, self._pids = _shared_memory(group, self.rank, self.size, nbytes)
        self.is_shared = memory is not None
        if memory is not None:
            self._turns = memoryview(memory)[: self.size * _LINE].cast("q")
            values = torch.frombuffer(memory, dtype=torch.float32, offset=self.size * _LINE)
            self._values = values.view(2, self.size, _CAPACITY)

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        return self  # the processes are the same

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes of floating point values of one shape and dtype."""
        if not self._has_room_for(values):
            values = values.contiguous()
            dist.all_reduce(values, group=self._group)
            return values
        return self._all(values).sum(0).view(values.shape).to(values.dtype)

    def side_by_side(self, values: Tensor) -> Tensor:
        """Concatenate [..., N of each process] to [..., N of all], in the order of the processes, in one shape and float dtype."""
        if not self._has_room_for(values):
            values = values.contiguous()
            parts = [torch.empty_like(values) for _ in range(self.size)]
            dist.all_gather(parts, values, group=self._group)
            return torch.cat(parts, dim=-1)
        parts_of_all = self._all(values).view(self.size, *values.shape)
        return torch.cat(parts_of_all.unbind(0), dim=-1).to(values.dtype)

    def _has_room_for(self, values: Tensor) -> bool:
        """Return whether the values fit into shared memory exactly: float64 would be rounded."""
        return self.is_shared and values.numel() <= _CAPACITY and values.dtype is not torch.float64

    def _all(self, values: Tensor) -> Tensor:
        """Return the values of all processes, float32 [processes, numbers].

        The exchange after the next one overwrites them; by then all processes have started the next one, and so have read these.
        """
        self._turn += 1
        mine = self._values[self._turn % 2, :, : values.numel()]
        mine[self.rank].copy_(values.reshape(-1))
        places = _LINE // 8
        self._turns[self.rank * places] = self._turn
        for other in range(self.size):
            looks = 0
            while self._turns[other * places] < self._turn:
                looks += 1
                if looks > _AWAKE:
                    self._wait(other, looks)
        return mine

    def _wait(self, other: int, looks: int) -> None:
        os.sched_yield()
        if looks % _PATIENT:
            return
        time.sleep(0.0005)
        if not _is_alive(self._pids[other]):
            raise RuntimeError(f"process {self._pids[other]} (rank {other}) of the group has exited")


def _shared_memory(
    group: dist.ProcessGroup | None, rank: int, size: int, nbytes: int
) -> tuple[mmap.mmap | None, list[int]]:
    """Return memory of the first process that all have mapped, or None if one cannot map it, and the ids of the processes."""
    file = os.memfd_create("hf_cpu_accel") if rank == 0 else -1
    if rank == 0:
        os.ftruncate(file, nbytes)
    members: list[Any] = [None] * size
    dist.all_gather_object(members, (os.getpid(), file, _machine()), group=group)
    memory, (pid, theirs, machine) = None, members[0]
    try:
        if platform.machine() in ("x86_64", "AMD64") and _machine() == machine:
            opened = file if rank == 0 else os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR)
            memory = mmap.mmap(opened, nbytes)
            if rank:
                os.close(opened)
    except OSError:  # in another container, or of another user
        memory = None
    able: list[Any] = [None] * size
    dist.all_gather_object(able, memory is not None, group=group)
    if rank == 0:
        os.close(file)
    return memory if all(able) else None, [process for process, _, _ in members]


def _is_alive(pid: int) -> bool:
    """Return whether a process runs; an ended one still exists until its parent has waited for it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _machine() -> str:
    """Return a key of the machine, or of the container if it has its own process ids."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
