"""The allocator in use, and the heap that keeps its pages (in a process of its own: the setting stays)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from hf_cpu_accel.runtime import memory
from tests.children import run_child

Plant = Callable[[Mapping[str, str]], Path]
LINE = "7f00-7f01 r-xp 00000000 fe:00 123   {}\n"


@pytest.mark.parametrize(
    ("libraries", "expected"),
    [
        (["/usr/lib/x86_64-linux-gnu/libc.so.6"], "glibc"),
        (["/lib/x86_64-linux-gnu/libc-2.31.so"], "glibc"),
        (["/lib/libc.so.6", "/usr/lib/libjemalloc.so.2"], "jemalloc"),
        (["/lib/libc.so.6", "/opt/my libs/libtcmalloc_minimal.so.4 (deleted)"], "tcmalloc"),
        (["/lib/libc.so.6", "/lib/libmimalloc.so.2.1"], "mimalloc"),
        (["/lib/ld-musl-x86_64.so.1"], "musl"),
        (["/usr/bin/program"], "unknown"),
        ([], "unknown"),
    ],
)
def test_allocator(plant: Plant, libraries: list[str], expected: str) -> None:
    root = plant({"proc/self/maps": "".join(LINE.format(library) for library in libraries)})
    assert memory.allocator(root) == expected


def test_anonymous_maps_are_no_libraries(plant: Plant) -> None:
    assert memory.allocator(plant({"proc/self/maps": LINE.format("") + LINE.format("[heap]")})) == "unknown"


@pytest.mark.parametrize("mode", ["always", "madvise", "never"])
def test_transparent_hugepages(plant: Plant, mode: str) -> None:
    text = "always madvise never".replace(mode, f"[{mode}]")
    root = plant({"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert memory.transparent_hugepages(root) == mode


def test_nothing_told(tmp_path: Path) -> None:
    assert memory.transparent_hugepages(tmp_path) == "unknown"
    assert memory.memory_stall(tmp_path) is None


def test_memory_stall(plant: Plant) -> None:
    text = "some avg10=12.50 avg60=1.00 avg300=0.10 total=99\nfull avg10=3.00 avg60=0.00 avg300=0.00 total=9"
    assert memory.memory_stall(plant({"proc/pressure/memory": text})) == 12.5


@pytest.mark.parametrize("size", [0, 1000, 1 << 31])
def test_bad_block_size(size: int) -> None:
    with pytest.raises(ValueError, match="largest_block"):
        memory.keep_heap(size)


def test_other_allocators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_status", memory.heap_status())
    monkeypatch.setattr(memory, "allocator", lambda: "jemalloc")
    assert not memory.keep_heap()
    assert "jemalloc" in memory.heap_status().reason
    assert not memory.trim_heap()


PROGRAM = """
import ctypes, resource, sys
from hf_cpu_accel.runtime import memory

def faults(size, calls=20):
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    def call():
        block = libc.malloc(size)
        ctypes.memset(block, 1, size)
        libc.free(block)
    call()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / calls

size = 40 << 20
fresh = faults(size)
worked = memory.keep_heap()
kept = faults(size)
print(memory.allocator(), fresh, worked, kept, memory.heap_status().kept, memory.trim_heap())
"""


def test_kept_heap_has_no_page_faults() -> None:
    done = run_child([sys.executable, "-c", PROGRAM], check=True)
    allocator, fresh, worked, kept, known, trimmed = done.stdout.split()
    assert worked == known == trimmed == str(allocator == "glibc")
    if worked == "True":
        assert float(kept) < 100
        assert float(kept) < float(fresh) / 10


def test_huge_pages_are_asked_for_whole_ones_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Libc:
        @staticmethod
        def madvise(address: ctypes.c_void_p, length: ctypes.c_size_t, advice: int) -> int:
            asked.append((address.value, length.value, advice))
            return 0

    monkeypatch.setattr(memory, "_glibc", Libc)
    page = 2 << 20
    assert memory.want_huge_pages(5 * page + 64, 3 * page)
    assert asked == [(6 * page, 2 * page, 14)]
    assert not memory.want_huge_pages(5 * page + 64, 2 * page - 65)
    monkeypatch.setattr(memory, "_glibc", lambda: None)
    assert not memory.want_huge_pages(5 * page, 3 * page)


def test_huge_pages_hold_what_is_written() -> None:
    block = torch.empty(9 << 20, dtype=torch.uint8)
    memory.want_huge_pages(block.data_ptr(), block.nbytes)
    assert (block.fill_(7) == 7).all()
