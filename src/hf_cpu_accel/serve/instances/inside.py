"""What can be set for instances from inside of a process that runs already, and what is told instead."""

from __future__ import annotations

import os

from hf_cpu_accel.runtime import memory
from hf_cpu_accel.serve.instances.placement import Placement
from hf_cpu_accel.serve.instances.settings import Setting

_TOKENIZERS = "TOKENIZERS_PARALLELISM"


class Variables:
    """Environment variables that libraries look at in each call; what the user has set stays."""

    def __init__(self) -> None:
        self._ours = _TOKENIZERS not in os.environ
        if self._ours:
            os.environ[_TOKENIZERS] = "false"

    def settings(self) -> list[Setting]:
        why = (
            "threads of tokenizers would share the cores of one instance" if self._ours else "was set before"
        )
        return [Setting(_TOKENIZERS, os.environ.get(_TOKENIZERS, ""), why)]

    def put_back(self) -> None:
        if self._ours:
            os.environ.pop(_TOKENIZERS, None)
            self._ours = False


def settings(placement: Placement, kind: str, pin: bool, variables: Variables) -> list[Setting]:
    """The rows of an `InstancePool`."""
    instances = f"{len(placement.places)} {'processes' if kind == 'process' else 'threads'}"
    rows = [Setting("instances", instances, placement.reason)]
    for number, place in enumerate(placement.places):
        where = str(place) if pin else f"{place.threads} threads, not pinned"
        rows.append(Setting(f"instance {number}", where, "" if pin else "pin=False"))
    return [*rows, *variables.settings(), allocator(), huge_pages()]


def allocator() -> Setting:
    """Who serves malloc: chosen before a process starts."""
    name = memory.allocator()
    why = (
        "preloaded"
        if name in ("jemalloc", "tcmalloc", "mimalloc")
        else "`hf-cpu-accel launch` preloads another"
    )
    return Setting("allocator", name, f"{why}; the kernels' buffers are a pool of their own")


def huge_pages() -> Setting:
    """The kernel's mode, and who asks for them where it is madvise."""
    mode = memory.transparent_hugepages()
    asked = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    whose = "the kernels' buffers ask for them" + (", and so does torch" if asked else "")
    hint = "" if asked else "; torch does under `hf-cpu-accel launch`"
    why = {
        "madvise": whose + hint,
        "always": "wherever the system finds some",
        "never": "switched off for all",
    }
    return Setting("huge pages", mode, why.get(mode, "this system does not tell"))
