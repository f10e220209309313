"""The environment of a process of `hf-cpu-accel launch`: allocator, threads and huge pages. Variables of the user stay unchanged.

The variables and values are those of torch.backends.xeon.run_cpu. Its code is not used, for three reasons:

- It does not find allocators in the folders of Debian.
- It counts the cores of the machine, also if a container or `taskset` grants fewer.
- It preloads Intel OpenMP next to GNU OpenMP, which torch and the kernels use.
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
    """Return lib`name` for LD_PRELOAD: its name for the system's loader, or its path in this Python environment (conda)."""
    library = ctypes.util.find_library(name)
    if library is not None:
        return library
    return next((str(path) for path in sorted(Path(sys.prefix, "lib").glob(f"lib{name}.so*"))), None)


def variables(
    threads: int,
    environ: Mapping[str, str],
    allocator: str = "auto",
    *,
    find: Find = find_library,
    root: Path = Path("/"),
) -> tuple[dict[str, str], list[Setting]]:
    """Return the variables to add to `environ` for an instance, and a row for each setting.

    Args:
        threads: number of threads of the instance.
        environ: the environment of this process.
        allocator: one of `ALLOCATORS`.
        find: finds a library by its name.
        root: folder that contains `/sys`.

    Raises:
        ValueError: an unknown allocator, or one that is not installed.
    """
    defaults = [Setting("OMP_NUM_THREADS", str(threads), "one thread per core of the instance")]
    defaults += _allocator(allocator, environ, find)
    defaults.append(
        Setting(
            "THP_MEM_ALLOC_ENABLE",
            "1",
            f"torch uses huge pages for large tensors; the mode of the system is {memory.transparent_hugepages(root)}",
        )
    )
    defaults.append(
        Setting(
            "TOKENIZERS_PARALLELISM", "false", "threads of tokenizers would share the cores of the instance"
        )
    )
    rows = [_user_setting(row, environ) or row for row in defaults]
    return {
        row.name: row.value
        for row, default in zip(rows, defaults, strict=True)
        if row is default and row.name.isupper()
    }, rows


def _user_setting(default: Setting, environ: Mapping[str, str]) -> Setting | None:
    """Return the row of a variable that the user has set; None for other variables, and for LD_PRELOAD, which is extended."""
    value = environ.get(default.name)
    if value is None or default.name == "LD_PRELOAD":
        return None
    return Setting(default.name, value, "already set, unchanged")


def _allocator(name: str, environ: Mapping[str, str], find: Find) -> list[Setting]:
    if name not in ALLOCATORS:
        raise ValueError(f"allocator={name!r}: accepted are {', '.join(ALLOCATORS)}")
    preloaded = environ.get("LD_PRELOAD", "")
    if any(library in preloaded for library in (*_LIBRARIES, "mimalloc")):
        return [Setting("allocator", preloaded, "already in LD_PRELOAD, unchanged")]
    for candidate in _LIBRARIES if name == "auto" else (name,):
        library = next(filter(None, map(find, _LIBRARIES.get(candidate, ()))), None)
        if library is not None:
            return _preload(candidate, library, preloaded)
    if name in _PACKAGES:
        raise ValueError(
            f"allocator={name!r} is not installed: run `apt-get install {_PACKAGES[name]}`, or pass allocator='auto'"
        )
    why = "few arenas limit the growth of resident memory"
    if name == "auto":
        why += f"; jemalloc and tcmalloc are not installed (`apt-get install {_PACKAGES['jemalloc']}`)"
    return [Setting("MALLOC_ARENA_MAX", "2", why)]


def _preload(name: str, library: str, preloaded: str) -> list[Setting]:
    rows = [
        Setting(
            "LD_PRELOAD",
            os.pathsep.join(filter(None, (library, preloaded))),
            f"{name} reuses large blocks, while glibc maps them again",
        )
    ]
    if name == "jemalloc":
        value = "oversize_threshold:1,background_thread:true,metadata_thp:auto"
        rows.append(Setting("MALLOC_CONF", value, "as in torch.backends.xeon.run_cpu"))
    return rows
