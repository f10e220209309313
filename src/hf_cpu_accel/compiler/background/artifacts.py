"""Compiled blocks on disk: found by what they were made of and with, used only if nothing of that has changed.

An artefact is machine code. It is loaded from the folder of this package in the user's own home alone.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import shutil
import stat
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn

from hf_cpu_accel import extension, hardware
from hf_cpu_accel.compiler.background.bound import Library
from hf_cpu_accel.compiler.background.calls import Key
from hf_cpu_accel.compiler.background.reads import structure
from hf_cpu_accel.compiler.background.sources import unchanged
from hf_cpu_accel.compiler.background.trace import Compiled
from hf_cpu_accel.compiler.fingerprint import fingerprint
from hf_cpu_accel.runtime.home import home_folder

_DESCRIPTION = "block.pickle"


def folder_of(block: nn.Module, key: Key) -> Path:
    """Where artefacts for blocks of this structure and calls of this form are, each in a folder of its own."""
    cpu = hardware.detect()
    made_with = (torch.__version__, _version("transformers"), fingerprint(), platform.python_version())
    made_for = (cpu.arch, sorted(cpu.flags), extension.status().tier)
    text = repr((made_with, made_for, structure(block), key))
    return home_folder() / "compiled" / hashlib.sha256(text.encode()).hexdigest()[:32]


def find(block: nn.Module, key: Key) -> Library | None:
    """An artefact made for such a block and call, whose sources are unchanged; None if there is none."""
    for folder in sorted(path for path in folder_of(block, key).glob("*") if (path / _DESCRIPTION).is_file()):
        library = load(folder)
        if library is not None and library.fits(block):
            return library
    return None


def load(folder: Path) -> Library | None:
    """The artefact in `folder`; None if it is damaged, stale, or not this user's own."""
    try:
        if not all(_is_own(path) for path in (folder, *folder.iterdir())):
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
