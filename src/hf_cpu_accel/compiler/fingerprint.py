"""What the caches of compiled graphs must know of us besides the graph: the graph names our ops, this says which ones they are."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from hf_cpu_accel.runtime.files import PACKAGE

# The passes and what they ask for; the ops' shapes, strides and arguments; the layout of packed weights; what generated code calls.
_SOURCES = ("compiler/**/*.py", "ops/**/*.py", "packing/**/*.py", "csrc/ops/tiles.h")


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Another one after any file of the passes, lowerings, ops or packing has changed."""
    return fingerprint_of(PACKAGE)


def fingerprint_of(package: Path) -> str:
    """The same of the package in that folder."""
    digest = hashlib.sha256()
    for source in _SOURCES:
        for file in sorted(package.glob(source)):
            digest.update(f"{file.relative_to(package)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
