"""The folder on disk where the package keeps what is too big or too dear to hold in memory."""

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
    """``$HF_CPU_ACCEL_HOME``, else ``~/.cache/hf_cpu_accel``; not created.

    Deliberately no temporary folder: ``/tmp`` is memory on many machines, and what is put here is put here to
    save it.
    """
    environ = os.environ if environ is None else environ
    chosen = environ.get(HOME_VARIABLE, "")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "hf_cpu_accel"


def cache_folder(*names: str) -> Path:
    """The folder of that name in the home folder, from which files are read; not created.

    Where another user owns or can write to one of the folders on the way, one warning says so and what to do, and the folder is a
    temporary one that goes with this process: nothing is kept then.
    """
    home = home_folder().resolve()  # whoever owns the home of the user may have put it elsewhere by a link
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
    if os.getpid() == process:  # a forked process has no part in it
        shutil.rmtree(folder, ignore_errors=True)
