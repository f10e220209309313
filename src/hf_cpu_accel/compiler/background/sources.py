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

from hf_cpu_accel.runtime.files import PACKAGE

# What the version numbers and the fingerprint in an artifact's key say already.
_KNOWN = tuple(f"{Path(folder).resolve()}/" for folder in (*torch.__path__, str(PACKAGE)))
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
    """{file: hash of its text} of those that do not belong to Python, torch or this package.

    Files are named as they are below the folder that Python imports them from, so that another installation has them, too.
    """
    found = {}
    for name in files:
        path = Path(name).resolve()
        standard = str(path).startswith(_STANDARD) and "site-packages" not in path.parts
        if not standard and not str(path).startswith(_KNOWN) and path.is_file():
            found[_portable(path)] = _hash(path)
    return found


def unchanged(stamps: dict[str, str]) -> bool:
    """Whether all files are found and have that text."""
    return all((path := _found(name)) is not None and _hash(path) == stamp for name, stamp in stamps.items())


def _portable(path: Path) -> str:
    folders = [Path(entry).resolve() for entry in sys.path if entry]
    names = [str(path.relative_to(folder)) for folder in folders if path.is_relative_to(folder)]
    return min(names, key=len, default=str(path))


def _found(name: str) -> Path | None:
    paths = [Path(name)] if Path(name).is_absolute() else [Path(entry) / name for entry in sys.path if entry]
    return next((path for path in paths if path.is_file()), None)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
