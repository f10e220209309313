"""What an answer is valid for: the machine, the libraries, and the number of threads."""

from __future__ import annotations

import os
import zlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hf_cpu_accel import extension
from hf_cpu_accel.runtime import hardware


def machine_key(threads: int) -> dict[str, Any]:
    """As plain JSON types; equal keys mean that times compare.

    Clouds call different CPUs by one name, so flags and caches are in it too; kernels under development have one version for many
    libraries, so the library's checksum is.
    """
    cpu = hardware.detect()
    return {
        "cpu": cpu.model_name,
        "flags": f"{zlib.crc32(' '.join(sorted(cpu.flags)).encode()):08x}",
        "caches": [cpu.l1d, cpu.l2, cpu.l3],
        "tier": cpu.tier,
        "threads": threads,
        "torch": torch.__version__,
        "package": _package_version(),
        "kernels": _library_checksum(),
    }


def is_busy() -> bool:
    """Whether more tasks wanted to run in the last minute than there are CPUs: times measured then say little."""
    if not hasattr(os, "getloadavg"):
        return False
    return os.getloadavg()[0] > 1.25 * (os.cpu_count() or 1)


def _package_version() -> str:
    try:
        return version("hf_cpu_accel")
    except PackageNotFoundError:  # a source tree on the path
        return "unknown"


@lru_cache(maxsize=1)
def _library_checksum() -> str | None:
    path = extension.status().path
    return None if path is None else f"{zlib.crc32(Path(path).read_bytes()):08x}"
