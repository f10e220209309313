"""The heap and its pages: which allocator serves, whether it gives memory back, and how to make it stop.

Why it matters: glibc maps every block above a threshold (at most 32 MiB) afresh and unmaps it when it is
freed, so that each large output tensor pays one page fault per 4 KiB, and faults are dear on virtual
machines. Adding 1 to an 80 MB tensor took 26 ms with 19,500 faults on a 2-core cloud machine, 7.5 ms with the
heap kept.

The kernels' outputs and workspaces come from a pool of their own (csrc/buffers.h), on huge pages where the system allows
them on request: a warm model takes nothing from the system. Only torch's own tensors are left to `keep_heap()`, and it
stays a choice: it is for the whole process, and before 2.38 glibc's memalign, which torch calls, cannot reuse a block beside
which a fragment lies, so that a raised threshold makes the heap grow without end in some processes.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hf_cpu_accel.runtime.files import read_text

# <malloc.h> of glibc
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_HUGE_PAGE = 2 << 20
_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14  # <sys/mman.h> of Linux

_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


@dataclass(frozen=True)
class HeapStatus:
    """Whether freed blocks stay with the process, up to which size in bytes, and why or why not."""

    kept: bool
    largest_block: int
    reason: str


_status = HeapStatus(False, 0, "keep_heap() was not called, so the allocator uses its defaults")


def keep_heap(largest_block: int = 1 << 30) -> bool:
    """From now on keep freed blocks up to ``largest_block`` bytes for reuse; True if that worked.

    For the whole process and for good: opt in where one process serves one model for long. The price is that
    resident memory stays at its highest mark; ``trim_heap()`` gives it back once, for instance after a model
    was packed. Only glibc's own allocator can be told so; ``heap_status()`` has the reason if it did not
    work. Large blocks of threads other than the main one are still mapped afresh, as glibc's side arenas end
    at 64 MiB.

    Raises ValueError unless ``largest_block`` is from 128 KiB, glibc's default, to below 2 GiB, its limit.
    """
    global _status
    if not 128 << 10 <= largest_block < 1 << 31:
        raise ValueError(f"largest_block={largest_block}: expected {128 << 10} to {(1 << 31) - 1} bytes")
    name = allocator()
    libc = _glibc()
    if name != "glibc" or libc is None:
        _status = HeapStatus(False, 0, f"the allocator is {name}, and only glibc's can be configured")
        return False
    # Before 2.35 glibc refuses a threshold above 32 MiB (half of its HEAP_MAX_SIZE).
    for size in (largest_block, 32 << 20):
        if size <= largest_block and libc.mallopt(_M_MMAP_THRESHOLD, size) == 1:
            libc.mallopt(_M_TRIM_THRESHOLD, -1)  # (size_t) -1: never shrink the heap
            _status = HeapStatus(True, size, f"freed blocks up to {size >> 20} MiB stay in the heap")
            return True
    _status = HeapStatus(False, 0, "glibc rejected the new threshold (mallopt returned 0)")
    return False


def heap_status() -> HeapStatus:
    """What ``keep_heap()`` last did."""
    return _status


def trim_heap() -> bool:
    """Give the heap's free pages back to the system once, and the output buffers that the kernels keep for reuse.

    True if the heap had any, False without glibc.
    """
    release_buffers()
    libc = _glibc()
    return libc is not None and allocator() == "glibc" and libc.malloc_trim(0) == 1


def want_huge_pages(address: int, nbytes: int) -> bool:
    """Ask for huge pages for the whole ones among ``nbytes`` of memory at ``address``; True if the system listens.

    For memory that is not written yet. Reading 4 KiB pages one after the other, processors stop at the end of each.
    """
    return _advise(address, nbytes, _HUGE_PAGE, _MADV_HUGEPAGE)


def drop_pages(address: int, nbytes: int) -> bool:
    """Give back the whole pages among ``nbytes`` of memory at ``address``, which a file is mapped to; True if the system did.

    Who looks there again sees what the file has, so what was written to these pages is lost.
    """
    return _advise(address, nbytes, mmap.PAGESIZE, _MADV_DONTNEED)


def release_buffers() -> int:
    """Free the idle output buffers of the kernels (at most 512 MiB are kept); how many bytes that were."""
    import torch  # here, since detecting the hardware reads this file's facts and must not wait for torch

    from hf_cpu_accel import extension

    if not extension.status().loaded:
        return 0
    return int(torch.ops.hf_cpu_accel.release_buffers())


def buffer_allocations() -> int:
    """How often the kernels asked the system for memory since they were loaded: it stands still once a model is warm."""
    import torch

    from hf_cpu_accel import extension

    return int(torch.ops.hf_cpu_accel.buffer_allocations()) if extension.status().loaded else 0


@cache
def allocator(root: Path = Path("/")) -> str:
    """Who serves ``malloc``: "jemalloc", "tcmalloc", "mimalloc", "glibc", "musl" or "unknown".

    Read once off the libraries mapped into this process (``/proc/self/maps``): a preloaded allocator is among
    them from the start.
    """
    libraries = set(re.findall(r"/([^/\n]+)$", read_text(root / "proc/self/maps") or "", re.MULTILINE))
    for name in _OTHER_ALLOCATORS:
        if any(library.startswith(f"lib{name}") for library in libraries):
            return name
    if any(re.match(r"libc(\.so\.6|-2\.\d+\.so)", library) for library in libraries):
        return "glibc"
    return "musl" if any(re.match(r"(ld|libc\.)-?musl", library) for library in libraries) else "unknown"


def transparent_hugepages(root: Path = Path("/")) -> str:
    """The kernel's mode: "always", "madvise", "never" or "unknown"."""
    text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    match = re.search(r"\[(always|madvise|never)\]", text)
    return match.group(1) if match else "unknown"


def memory_stall(root: Path = Path("/")) -> float | None:
    """Percent of the last 10 seconds in which some task waited for memory (kernel PSI), if told."""
    match = re.search(r"^some avg10=([\d.]+)", read_text(root / "proc/pressure/memory") or "", re.MULTILINE)
    return float(match.group(1)) if match else None


def _advise(address: int, nbytes: int, page: int, advice: int) -> bool:
    first, last = -(-address // page) * page, (address + nbytes) // page * page
    libc = _glibc()
    if libc is None or first >= last or not hasattr(libc, "madvise"):
        return False
    return bool(libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice) == 0)


def heap_end() -> int:
    """The address where the heap of the main arena ends now; 0 without glibc."""
    libc = _glibc()
    return 0 if libc is None else int(libc.sbrk(0))


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library of this process, if it is glibc."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such handle
        return None
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.sbrk.restype = ctypes.c_size_t
    return libc
