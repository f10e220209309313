"""A hash of the sources that compiled graphs depend on, for the keys of caches: a graph has only the names of the ops."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from hf_cpu_accel.runtime.files import PACKAGE

# The passes; the shapes, strides and arguments of the ops; the layout of packed weights; the interface of generated code;
# enumerations and structs that ops receive as numbers.
_SOURCES = ("compiler/**/*.py", "ops/**/*.py", "packing/**/*.py", "csrc/ops/tiles.h", "abi.py")


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Return the hash of this package, which changes with any file of the passes, lowerings, ops or packing."""
    return fingerprint_of(PACKAGE)


def fingerprint_of(package: Path) -> str:
    """Return the hash of the package in that folder."""
    digest = hashlib.sha256()
    for source in _SOURCES:
        for file in sorted(package.glob(source)):
            digest.update(f"{file.relative_to(package)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
