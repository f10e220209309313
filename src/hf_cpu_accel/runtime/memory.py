"""The heap and its pages: the allocator, whether it returns memory to the system, and how to stop that.

glibc maps every block above a threshold (at most 32 MiB) again, and unmaps it when it is freed. So each large output tensor has one
page fault per 4 KiB, which is slow on virtual machines. Adding 1 to an 80 MB tensor took 26 ms with 19,500 faults on a 2-core cloud
machine, and 7.5 ms with the heap kept.

The kernels' outputs and workspaces come from their own pool (csrc/buffers.h), on huge pages if the system allows them on request.
So a warm model allocates nothing from the system. `keep_heap()` is for torch's own tensors. It is optional because it affects the
whole process, and because memalign of glibc before 2.38, which torch calls, cannot reuse a block next to a fragment: in some
processes a raised threshold makes the heap grow without limit.
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
    """Status of the heap: whether freed blocks stay with the process, the largest such block in bytes, and the reason."""

    kept: bool
    largest_block: int
    reason: str


_status = HeapStatus(False, 0, "keep_heap() was not called, so the allocator uses its defaults")


def keep_heap(largest_block: int = 1 << 30) -> bool:
    """Keep freed blocks up to ``largest_block`` bytes in the process for reuse, from now on.

    It is permanent and for the whole process: use it in a process that serves one model. Resident memory then stays at its peak.
    ``trim_heap()`` returns it to the system once, for example after a model was packed. Large blocks of other threads than the main
    one are still mapped again, because glibc's other arenas end at 64 MiB.

    Args:
        largest_block: in bytes, from 128 KiB, glibc's default, to below 2 GiB, its limit.

    Returns:
        Whether it worked. Only glibc's allocator supports it; ``heap_status()`` has the reason.

    Raises:
        ValueError: ``largest_block`` is out of range.
    """
    global _status
    if not 128 << 10 <= largest_block < 1 << 31:
        raise ValueError(f"largest_block={largest_block}: expected {128 << 10} to {(1 << 31) - 1} bytes")
    name = allocator()
    libc = _glibc()
    if name != "glibc" or libc is None:
        _status = HeapStatus(False, 0, f"the allocator is {name}, and only glibc's can be configured")
        return False
    # glibc before 2.35 rejects a threshold above 32 MiB (half of its HEAP_MAX_SIZE).
    for size in (largest_block, 32 << 20):
        if size <= largest_block and libc.mallopt(_M_MMAP_THRESHOLD, size) == 1:
            libc.mallopt(_M_TRIM_THRESHOLD, -1)  # (size_t) -1: never shrink the heap
            _status = HeapStatus(True, size, f"freed blocks up to {size >> 20} MiB stay in the heap")
            return True
    _status = HeapStatus(False, 0, "glibc rejected the new threshold (mallopt returned 0)")
    return False


def heap_status() -> HeapStatus:
    """Return the result of the last ``keep_heap()``."""
    return _status


def trim_heap() -> bool:
    """Return the heap's free pages and the kernels' idle output buffers to the system, once.

    Returns:
        Whether the heap had free pages; False without glibc.
    """
    release_buffers()
    libc = _glibc()
    return libc is not None and allocator() == "glibc" and libc.malloc_trim(0) == 1


def want_huge_pages(address: int, nbytes: int) -> bool:
    """Request huge pages for the ``nbytes`` of memory at ``address``, and return whether the system supports that.

    For memory that is not written yet. With 4 KiB pages, the hardware prefetcher stops at the end of each page.
    """
    return _advise(address, nbytes, _HUGE_PAGE, _MADV_HUGEPAGE)


def drop_pages(address: int, nbytes: int) -> bool:
    """Drop the full pages among ``nbytes`` of a mapped file at ``address``, and return whether the system did.

    The next access reads the file again, so writes to these pages are lost.
    """
    return _advise(address, nbytes, mmap.PAGESIZE, _MADV_DONTNEED)


def release_buffers() -> int:
    """Free the idle output buffers of the kernels (at most 512 MiB), and return their bytes."""
    import torch  # not at the top, because detecting the hardware imports this file and must not import torch

    from hf_cpu_accel import extension

    if not extension.status().loaded:
        return 0
    return int(torch.ops.hf_cpu_accel.release_buffers())


def buffer_allocations() -> int:
    """Return how often the kernels have allocated memory from the system; constant once a model is warm."""
    import torch

    from hf_cpu_accel import extension

    return int(torch.ops.hf_cpu_accel.buffer_allocations()) if extension.status().loaded else 0


@cache
def allocator(root: Path = Path("/")) -> str:
    """Return the allocator of ``malloc``: "jemalloc", "tcmalloc", "mimalloc", "glibc", "musl" or "unknown".

    Read once from the libraries mapped into this process (``/proc/self/maps``), which include a preloaded allocator.
    """
    libraries = set(re.findall(r"/([^/\n]+)$", read_text(root / "proc/self/maps") or "", re.MULTILINE))
    for name in _OTHER_ALLOCATORS:
        if any(library.startswith(f"lib{name}") for library in libraries):
            return name
    if any(re.match(r"libc(\.so\.6|-2\.\d+\.so)", library) for library in libraries):
        return "glibc"
    return "musl" if any(re.match(r"(ld|libc\.)-?musl", library) for library in libraries) else "unknown"


def transparent_hugepages(root: Path = Path("/")) -> str:
    """Return the kernel's mode: "always", "madvise", "never" or "unknown"."""
    text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    match = re.search(r"\[(always|madvise|never)\]", text)
    return match.group(1) if match else "unknown"


def memory_stall(root: Path = Path("/")) -> float | None:
    """Return the per cent of the last 10 seconds in which some task waited for memory (kernel PSI), or None."""
    match = re.search(r"^some avg10=([\d.]+)", read_text(root / "proc/pressure/memory") or "", re.MULTILINE)
    return float(match.group(1)) if match else None


def _advise(address: int, nbytes: int, page: int, advice: int) -> bool:
    first, last = -(-address // page) * page, (address + nbytes) // page * page
    libc = _glibc()
    if libc is None or first >= last or not hasattr(libc, "madvise"):
        return False
    return bool(libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice) == 0)


def heap_end() -> int:
    """Return the end address of the heap of the main arena; 0 without glibc."""
    libc = _glibc()
    return 0 if libc is None else int(libc.sbrk(0))


@cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library of this process if it is glibc, else None."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such handle
        return None
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.sbrk.restype = ctypes.c_size_t
    return libc
