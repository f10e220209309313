"""Which Python files ran while a block was traced: compiled code is stale when one of them has changed."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hf_cpu_accel

# What the version numbers and the fingerprint in an artefact's key say already.
_KNOWN = tuple(
    str(Path(folder).resolve()) + "/"
    for folder in (
        *torch.__path__,
        *hf_cpu_accel.__path__,
    )
)
_STANDARD = str(Path(sysconfig.get_paths()["stdlib"]).resolve()) + "/"


@contextmanager
def executed() -> Iterator[set[str]]:
    """Inside, the files of the functions that this thread calls are noted."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(before)


def stamps(files: set[str]) -> dict[str, str]:
    """{file: hash of its text} of those that do not belong to Python, torch or this package."""
    found = {}
    for name in files:
        path = Path(name).resolve()
        standard = str(path).startswith(_STANDARD) and "site-packages" not in path.parts
        if not standard and not str(path).startswith(_KNOWN) and path.is_file():
            found[str(path)] = _hash(path)
    return found


def unchanged(stamps: dict[str, str]) -> bool:
    return all(Path(name).is_file() and _hash(Path(name)) == stamp for name, stamp in stamps.items())


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
