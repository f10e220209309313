"""What a process is given before it starts, for `hf-cpu-accel launch`: allocator, threads, huge pages. What the user has set stays.

Variables and values are those of torch.backends.xeon.run_cpu where it has them. Its code does not carry over: it looks for
allocators in no folder of Debian's, counts the machine's cores where a container or `taskset` grants fewer, and preloads Intel's
OpenMP beside the GNU one that torch and the kernels were built with.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from hf_cpu_accel.runtime import memory
from hf_cpu_accel.serve.instances.settings import Setting

ALLOCATORS = ("auto", "jemalloc", "tcmalloc", "default")
_LIBRARIES = {"jemalloc": ("jemalloc",), "tcmalloc": ("tcmalloc_minimal", "tcmalloc")}
_PACKAGES = {"jemalloc": "libjemalloc2", "tcmalloc": "libtcmalloc-minimal4"}

Find = Callable[[str], str | None]


def find_library(name: str) -> str | None:
    """What LD_PRELOAD calls lib`name`: as the system's loader knows it, or in the folder of this Python's environment (conda)."""
    found = ctypes.util.find_library(name)
    if found is not None:
        return found
    return next((str(path) for path in sorted(Path(sys.prefix, "lib").glob(f"lib{name}.so*"))), None)


def variables(
    threads: int,
    environ: Mapping[str, str],
    allocator: str = "auto",
    *,
    find: Find = find_library,
    root: Path = Path("/"),
) -> tuple[dict[str, str], list[Setting]]:
    """The variables of an instance of so many threads, to be set beside `environ`, and a row for each.

    Raises:
        ValueError: an allocator that is unknown, or asked for by its name and not installed.
    """
    wanted = [Setting("OMP_NUM_THREADS", str(threads), "one thread for each core of the instance")]
    wanted += _allocator(allocator, environ, find)
    wanted.append(
        Setting(
            "THP_MEM_ALLOC_ENABLE",
            "1",
            f"torch asks for huge pages; the system's mode is {memory.transparent_hugepages(root)}",
        )
    )
    wanted.append(
        Setting("TOKENIZERS_PARALLELISM", "false", "threads of tokenizers would share the instance's cores")
    )
    rows = [_kept(row, environ) for row in wanted]
    return {
        row.name: row.value
        for row, asked in zip(rows, wanted, strict=True)
        if row is asked and row.name.isupper()
    }, rows


def _kept(row: Setting, environ: Mapping[str, str]) -> Setting:
    """Nothing that was set is overruled, but for the list of libraries, which ours is put in front of."""
    set_before = environ.get(row.name)
    if set_before is None or row.name == "LD_PRELOAD":
        return row
    return Setting(row.name, set_before, "kept: it was set before")


def _allocator(asked: str, environ: Mapping[str, str], find: Find) -> list[Setting]:
    if asked not in ALLOCATORS:
        raise ValueError(f"allocator={asked!r}: accepted are {', '.join(ALLOCATORS)}")
    preloaded = environ.get("LD_PRELOAD", "")
    if any(name in preloaded for name in (*_LIBRARIES, "mimalloc")):
        return [Setting("allocator", preloaded, "kept: LD_PRELOAD had it before")]
    for name in _LIBRARIES if asked == "auto" else (asked,):
        library = next(filter(None, map(find, _LIBRARIES.get(name, ()))), None)
        if library is not None:
            return _preload(name, library, preloaded)
    if asked in _PACKAGES:
        raise ValueError(f"allocator={asked!r} is not installed: `apt-get install {_PACKAGES[asked]}`")
    why = "few arenas keep resident memory from growing"
    if asked == "auto":
        why += f"; jemalloc and tcmalloc are not installed (`apt-get install {_PACKAGES['jemalloc']}`)"
    return [Setting("MALLOC_ARENA_MAX", "2", why)]


def _preload(name: str, library: str, preloaded: str) -> list[Setting]:
    rows = [
        Setting(
            "LD_PRELOAD",
            os.pathsep.join(filter(None, (library, preloaded))),
            f"{name}: blocks are kept and reused, where glibc maps large ones anew",
        )
    ]
    if name == "jemalloc":
        value = "oversize_threshold:1,background_thread:true,metadata_thp:auto"
        rows.append(Setting("MALLOC_CONF", value, "as torch.backends.xeon.run_cpu has it"))
    return rows
