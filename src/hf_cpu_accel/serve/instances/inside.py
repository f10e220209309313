"""The settings of instances that a running process can change, and hints for those that only `launch` can change."""

from __future__ import annotations

import os

from hf_cpu_accel.runtime import memory
from hf_cpu_accel.serve.instances.placement import Placement
from hf_cpu_accel.serve.instances.settings import Setting

_TOKENIZERS = "TOKENIZERS_PARALLELISM"


class Variables:
    """Set environment variables that libraries read in each call; variables of the user stay unchanged."""

    def __init__(self) -> None:
        self._is_set = _TOKENIZERS not in os.environ
        if self._is_set:
            os.environ[_TOKENIZERS] = "false"

    def settings(self) -> list[Setting]:
        """Return a row for each variable."""
        why = (
            "threads of tokenizers would share the cores of one instance"
            if self._is_set
            else "already set, unchanged"
        )
        return [Setting(_TOKENIZERS, os.environ.get(_TOKENIZERS, ""), why)]

    def restore(self) -> None:
        """Remove the variables that were set."""
        if self._is_set:
            os.environ.pop(_TOKENIZERS, None)
            self._is_set = False


def settings(placement: Placement, kind: str, pin: bool, variables: Variables) -> list[Setting]:
    """Return the rows of an `InstancePool`."""
    instances = f"{len(placement.places)} {'processes' if kind == 'process' else 'threads'}"
    rows = [Setting("instances", instances, placement.reason)]
    for number, place in enumerate(placement.places):
        where = str(place) if pin else f"{place.threads} threads, not pinned"
        rows.append(Setting(f"instance {number}", where, "" if pin else "pin=False"))
    return [*rows, *variables.settings(), allocator(), huge_pages()]


def allocator() -> Setting:
    """Return the row of the allocator, which is chosen before a process starts."""
    name = memory.allocator()
    why = (
        "preloaded"
        if name in ("jemalloc", "tcmalloc", "mimalloc")
        else "`hf-cpu-accel launch` preloads a faster one"
    )
    return Setting("allocator", name, f"{why}; the buffers of the kernels have their own pool")


def huge_pages() -> Setting:
    """Return the row of huge pages: the mode of the system, and the code that uses them in mode madvise."""
    mode = memory.transparent_hugepages()
    torch_uses_them = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    users = "the buffers of the kernels use them" + (", and so does torch" if torch_uses_them else "")
    hint = "" if torch_uses_them else "; torch does so with `hf-cpu-accel launch`"
    why = {
        "madvise": users + hint,
        "always": "on for all memory",
        "never": "off for all memory",
    }
    return Setting("huge pages", mode, why.get(mode, "not reported by this system"))
