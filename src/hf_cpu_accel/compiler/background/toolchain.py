"""Check whether this machine can compile, without importing Inductor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from hf_cpu_accel.compiler.torch_private import unknown_version


def why_off(environ: Mapping[str, str] | None = None) -> str | None:
    """Return why nothing can be compiled on this machine, or None."""
    if reason := unknown_version():
        return reason
    return None if compiler(environ) else "no C++ compiler found (install g++ or set CXX)"


def compiler(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the path of the C++ compiler in CXX, else of g++ or clang++; None if there is none.

    Inductor itself uses clang++ on Linux only if CXX names it. A child process that finds no compiler reports that.
    """
    environ = os.environ if environ is None else environ
    for candidate in filter(None, (environ.get("CXX"), "g++", "clang++")):
        path = shutil.which(candidate.split()[0], path=environ.get("PATH"))
        if path is not None:
            return path
    return None
