"""Whether anything can be compiled here, without importing Inductor to ask."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from hf_cpu_accel.compiler.torch_private import unknown_version


def why_off(environ: Mapping[str, str] | None = None) -> str | None:
    """Why nothing is compiled here, whatever is asked for; None if it would be."""
    if reason := unknown_version():
        return reason
    return None if compiler(environ) else "no C++ compiler found (install g++ or set CXX)"


def compiler(environ: Mapping[str, str] | None = None) -> str | None:
    """The path of the C++ compiler that CXX names, else of g++ or clang++; None if there is none.

    Inductor itself takes clang++ on Linux only where CXX names it; a child that finds nothing says so.
    """
    environ = os.environ if environ is None else environ
    for candidate in filter(None, (environ.get("CXX"), "g++", "clang++")):
        path = shutil.which(candidate.split()[0], path=environ.get("PATH"))
        if path is not None:
            return path
    return None
