"""Compiled blocks on disk, keyed by their sources and versions, and used only while those are unchanged.

An artifact is machine code and its description (`description.py`). It is loaded from two places:
- the folder of this package in the user's home, if no other user can have written there;
- a bundle that the user trusts.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn

from hf_cpu_accel import extension
from hf_cpu_accel.compiler.background import description
from hf_cpu_accel.compiler.background.bound import Library
from hf_cpu_accel.compiler.background.calls import Key
from hf_cpu_accel.compiler.background.compiled import LIBRARY, Compiled
from hf_cpu_accel.compiler.background.reads import structure
from hf_cpu_accel.compiler.background.sources import unchanged
from hf_cpu_accel.compiler.fingerprint import fingerprint
from hf_cpu_accel.compiler.report import say
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.runtime.home_folder import cache_folder
from hf_cpu_accel.runtime.private_files import make_folder, problem

_COMPILED = "compiled"
_FILES = (LIBRARY, description.TENSORS, description.NAME)
_logger = logging.getLogger("hf_cpu_accel.compiler")
_INSTRUCTIONS = re.compile(r"avx|amx|fma|f16c|sse4|asimd|sve|bf16|i8mm")  # flags that compilers use


def folder_of(block: nn.Module, key: Key) -> Path:
    """Return the folder for artifacts of blocks of this structure and calls of this form, one subfolder each."""
    cpu = hardware.detect()
    versions = (
        torch.__version__,
        _version("transformers"),
        fingerprint(),
        description.FORMAT,
        platform.python_version_tuple()[:2],
    )
    machine = (cpu.arch, sorted(filter(_INSTRUCTIONS.match, cpu.flags)), extension.status().tier)
    text = repr((versions, machine, structure(block), key))
    return cache_folder(_COMPILED, hashlib.sha256(text.encode()).hexdigest()[:32])


def find_artifact(block: nn.Module, key: Key, bundle: Path | None = None) -> Library | None:
    """Return an artifact for this block and call whose sources are unchanged, or None.

    Args:
        bundle: a folder that `export` wrote and that the user trusts.
    """
    local = folder_of(block, key)
    folders = (
        [(local, False)] if bundle is None else [(local, False), (bundle / _COMPILED / local.name, True)]
    )
    for folder, trusted in folders:
        for path in sorted(path for path in folder.glob("*") if (path / description.NAME).is_file()):
            library = load(path, trusted=trusted)
            if library is not None and library.fits(block):
                return library
    return None


def export(libraries: Iterable[Library], bundle: Path) -> int:
    """Copy the artifacts into the folder `bundle`, for machines of the same kind, and return their number."""
    folders = {library.folder for library in libraries}
    for folder in folders:
        shutil.copytree(folder, bundle / _COMPILED / folder.parent.name / folder.name, dirs_exist_ok=True)
    return len(folders)


def load(folder: Path, *, trusted: bool = False) -> Library | None:
    """Load the artifact in `folder`. Return None if it is damaged, stale, or neither `trusted` nor private to this user."""
    foreign = None if trusted else _foreign(folder)
    if foreign is not None:
        say(
            f"{foreign}: this compiled code is not loaded, because it would run with your permissions; "
            "remove it if it is not yours"
        )
        return None
    try:
        compiled = description.read(folder)
        return Library(compiled, folder) if unchanged(compiled.sources) else None
    except Exception:  # any error of a damaged file: the block is compiled again
        _logger.debug("hf_cpu_accel: %s", folder, exc_info=True)
        return None


def write(compiled: Compiled, source: Path, into: Path) -> Path:
    """Describe the library in the folder `source`, and move both into a new folder in `into`, atomically.

    Returns:
        The path of the artifact.

    Raises:
        TypeError, ValueError: `compiled` contains a value that a description cannot hold.
        OSError: `into` cannot be written.
    """
    description.write(compiled, source)
    target = Path(tempfile.mkdtemp(dir=make_folder(into), prefix=".new"))
    for name in _FILES:
        shutil.copyfile(source / name, target / name)
        (target / name).chmod(0o600)
    final = into / hashlib.sha256((target / description.NAME).read_bytes()).hexdigest()[:16]
    if load(final) is None:  # missing, damaged, or another user's
        _remove(final)
    try:
        os.rename(target, final)
    except OSError:  # another process was first
        shutil.rmtree(target, ignore_errors=True)
    return final


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _foreign(folder: Path) -> str | None:
    """Return the first file of an artifact that another user can have written, and why; None if there is no such file."""
    paths = (folder.parent, folder, *(folder / name for name in _FILES))
    reasons = ((path, problem(path)) for path in paths)
    return next((f"{path}: {reason}" for path, reason in reasons if reason is not None), None)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
