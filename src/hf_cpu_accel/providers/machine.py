"""The key of stored results: the machine, the libraries, and the number of threads."""

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
    """Return the key as JSON types; times with equal keys are comparable.

    Clouds use one name for different CPUs, so it includes flags and caches. Kernels under development have one version for many
    libraries, so it includes the library's checksum.
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
    """Return whether the load of the last minute exceeds the number of CPUs, which makes measured times unreliable."""
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
