"""The folder on disk where the package keeps what is too big or too dear to hold in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

HOME_VARIABLE = "HF_CPU_ACCEL_HOME"


def home_folder(environ: Mapping[str, str] | None = None) -> Path:
    """``$HF_CPU_ACCEL_HOME``, else ``~/.cache/hf_cpu_accel``; not created.

    Deliberately no temporary folder: ``/tmp`` is memory on many machines, and what is put here is put here to
    save it.
    """
    environ = os.environ if environ is None else environ
    chosen = environ.get(HOME_VARIABLE, "")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "hf_cpu_accel"
