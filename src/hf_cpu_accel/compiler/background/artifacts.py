"""Compiled blocks on disk: found by what they were made of and with, used only if nothing of that has changed.

An artefact is machine code. It is loaded from the folder of this package in the home of the user, and from a bundle that the user
has said to trust.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn

from hf_cpu_accel import extension, hardware
from hf_cpu_accel.compiler.background.bound import Library
from hf_cpu_accel.compiler.background.calls import Key
from hf_cpu_accel.compiler.background.compiled import Compiled
from hf_cpu_accel.compiler.background.reads import structure
from hf_cpu_accel.compiler.background.sources import unchanged
from hf_cpu_accel.compiler.fingerprint import fingerprint
from hf_cpu_accel.runtime.home import home_folder

_COMPILED, _DESCRIPTION = "compiled", "block.pickle"
_INSTRUCTIONS = re.compile(r"avx|amx|fma|f16c|sse4|asimd|sve|bf16|i8mm")  # flags that compilers look at


def folder_of(block: nn.Module, key: Key) -> Path:
    """Where artefacts for blocks of this structure and calls of this form are, each in a folder of its own."""
    cpu = hardware.detect()
    made_with = (
        torch.__version__,
        _version("transformers"),
        fingerprint(),
        platform.python_version_tuple()[:2],
    )
    made_for = (cpu.arch, sorted(filter(_INSTRUCTIONS.match, cpu.flags)), extension.status().tier)
    text = repr((made_with, made_for, structure(block), key))
    return home_folder() / _COMPILED / hashlib.sha256(text.encode()).hexdigest()[:32]


def find(block: nn.Module, key: Key, bundle: Path | None = None) -> Library | None:
    """An artefact made for such a block and call, whose sources are unchanged; None if there is none.

    Args:
        bundle: a folder that `export` wrote and that the user trusts.
    """
    own = folder_of(block, key)
    folders = [(own, False)] if bundle is None else [(own, False), (bundle / _COMPILED / own.name, True)]
    for folder, trusted in folders:
        for path in sorted(path for path in folder.glob("*") if (path / _DESCRIPTION).is_file()):
            library = load(path, trusted=trusted)
            if library is not None and library.fits(block):
                return library
    return None


def export(libraries: Iterable[Library], bundle: Path) -> int:
    """Copy the artefacts into the folder `bundle`, for machines of the same kind. Returns how many there are."""
    folders = {library.folder for library in libraries}
    for folder in folders:
        shutil.copytree(folder, bundle / _COMPILED / folder.parent.name / folder.name, dirs_exist_ok=True)
    return len(folders)


def load(folder: Path, *, trusted: bool = False) -> Library | None:
    """The artefact in `folder`; None if it is damaged, stale, or neither `trusted` nor this user's own."""
    try:
        if not trusted and not all(_is_own(path) for path in (folder, *folder.iterdir())):
            return None
        compiled = pickle.loads((folder / _DESCRIPTION).read_bytes())
        if not isinstance(compiled, Compiled) or not unchanged(compiled.sources):
            return None
        return Library(compiled, folder)
    except Exception:  # whatever a damaged file leads to, it is compiled anew
        return None


def write(compiled: Compiled, made: Path, into: Path) -> Path:
    """Put the artefact whose library is in the folder `made` beside the others in `into`, all at once."""
    (made / _DESCRIPTION).write_bytes(pickle.dumps(compiled))
    into.mkdir(parents=True, exist_ok=True)
    target = Path(tempfile.mkdtemp(dir=into, prefix=".new"))
    for name in os.listdir(made):
        shutil.copyfile(made / name, target / name)
    final = into / hashlib.sha256((target / _DESCRIPTION).read_bytes()).hexdigest()[:16]
    try:
        os.rename(target, final)
    except OSError:  # another process was first
        shutil.rmtree(target, ignore_errors=True)
    return final


def _is_own(path: Path) -> bool:
    """Whether nobody else can have put it there: it is code, and would run as this user."""
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWOTH


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
