"""The memory of a process, as the system, glibc and Python count it."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_cpu_accel.runtime.memory import allocator, trim_heap

MOST_GROWTH = 0.02  # of resident memory, after the warm-up
_FIELDS = [
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
]


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


@dataclass(frozen=True)
class Held:
    """Attributes:
    resident: bytes in memory, after free pages were given back.
    used: bytes that glibc has handed out and not got back, mapped blocks among them; None with another allocator.
    objects: that Python's collector tracks.
    files: open ones.
    """

    resident: int
    used: int | None
    objects: int
    files: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        trim_heap()
        status = Path("/proc/self/status").read_text()
        resident = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
        assert resident is not None
        files = len(os.listdir("/proc/self/fd"))
        return cls(int(resident.group(1)) * 1024, _used(), len(gc.get_objects()), files)


def growth(sizes: Sequence[int], parts: int = 4) -> float:
    """Return the growth of memory from the second of `parts` parts of these sizes to the last: 0.01 is one percent.

    The first part is the warm-up; of the others the median counts, as caches hold more or less at a moment.

    Args:
        sizes: bytes, at least one number.
    """
    length = max(1, len(sizes) // parts)
    early, late = sizes[length : 2 * length] or sizes[:1], sizes[-length:]
    return statistics.median(late) / statistics.median(early) - 1


def _used() -> int | None:
    libc = ctypes.CDLL(None)
    if allocator() != "glibc" or not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)
