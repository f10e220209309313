"""The folder on disk for caches of this package."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from hf_cpu_accel.runtime.private_files import problem

HOME_VARIABLE = "HF_CPU_ACCEL_HOME"
REMEDY = f"If it is yours, `chmod go-w` it; else set {HOME_VARIABLE} to a folder of your own."
_logger = logging.getLogger("hf_cpu_accel.runtime")


def home_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return ``$HF_CPU_ACCEL_HOME``, else ``~/.cache/hf_cpu_accel``, without creating it.

    Not a temporary folder, because ``/tmp`` is memory on many machines, and files here are to save memory.
    """
    environ = os.environ if environ is None else environ
    chosen = environ.get(HOME_VARIABLE, "")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "hf_cpu_accel"


def cache_folder(*names: str) -> Path:
    """Return a folder in the home folder, without creating it.

    If another user owns or can write to one of the folders in its path, log one warning, and return a temporary folder that is
    removed at exit.
    """
    home = home_folder().resolve()  # the home of the user may be a link
    levels = [home.joinpath(*names[:count]) for count in range(len(names) + 1)]
    for level in levels:
        reason = problem(level)
        if reason is not None:
            _warn(level, reason)
            return _temporary(os.getpid()).joinpath(*names)
    return levels[-1]


@cache
def _warn(path: Path, reason: str) -> None:
    _logger.warning("hf_cpu_accel: the cache folder %s is not used: %s. %s", path, reason, REMEDY)


@cache
def _temporary(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hf_cpu_accel-")).resolve()
    atexit.register(_remove, folder, process)
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked process
        shutil.rmtree(folder, ignore_errors=True)
