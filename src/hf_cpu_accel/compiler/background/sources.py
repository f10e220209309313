"""The Python files that ran while a block was traced. Compiled code is stale when one of them has changed."""

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

# Covered by the version numbers and the fingerprint in an artifact's key.
_KNOWN = tuple(f"{Path(folder).resolve()}/" for folder in (*torch.__path__, str(PACKAGE)))
_STANDARD = str(Path(sysconfig.get_paths()["stdlib"]).resolve()) + "/"


@contextmanager
def executed() -> Iterator[set[str]]:
    """Collect the files of the functions that this thread calls inside."""
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
    """Return {file: hash of its text} for files outside Python, torch and this package.

    File names are relative to the folder that Python imports them from, so that they are equal in other installations.
    """
    hashes = {}
    for name in files:
        path = Path(name).resolve()
        standard = str(path).startswith(_STANDARD) and "site-packages" not in path.parts
        if not standard and not str(path).startswith(_KNOWN) and path.is_file():
            hashes[_portable(path)] = _hash(path)
    return hashes


def unchanged(stamps: dict[str, str]) -> bool:
    """Return whether all files exist and have these hashes."""
    return all((path := _locate(name)) is not None and _hash(path) == stamp for name, stamp in stamps.items())


def _portable(path: Path) -> str:
    folders = [Path(entry).resolve() for entry in sys.path if entry]
    names = [str(path.relative_to(folder)) for folder in folders if path.is_relative_to(folder)]
    return min(names, key=len, default=str(path))


def _locate(name: str) -> Path | None:
    paths = [Path(name)] if Path(name).is_absolute() else [Path(entry) / name for entry in sys.path if entry]
    return next((path for path in paths if path.is_file()), None)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
