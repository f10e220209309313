"""Failures between two lines of the package, as a signal's handler or a lack of memory makes them, at chosen places."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import hf_cpu_accel

_PACKAGE = str(Path(hf_cpu_accel.__file__).parent)


class Fault(BaseException):
    """As `KeyboardInterrupt`: nobody who catches errors alone catches it."""


class Lines:
    """`with Lines(n):` raises a `Fault` at the n-th line of the package that this thread runs; None: it only counts them.

    But at no `with`: its line comes again at the end of the block, where Python lets no signal through before the block is left.
    """

    def __init__(self, fails_at: int | None = None) -> None:
        self.count, self._fails_at = 0, fails_at

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(_PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not _is_with(frame.f_code.co_filename, frame.f_lineno):
            self.count += 1
            if self.count == self._fails_at:
                sys.settrace(None)
                raise Fault
        return self._line


@cache
def _is_with(file: str, line: int) -> bool:
    return linecache.getline(file, line).lstrip().startswith("with ")


def lines_of(run: Callable[[], object]) -> int:
    """How many lines of the package it takes."""
    with Lines() as lines:
        run()
    return lines.count


def places(total: int, most: int) -> list[int]:
    """Line numbers from the first to the last, at most so many of them."""
    return sorted({1 + place * (total - 1) // (most - 1) for place in range(most)})


def is_stopped_at(line: int, run: Callable[[], object]) -> bool:
    """Run it until that line; False if it got to its end before."""
    try:
        with Lines(line):
            run()
    except Fault:
        return True
    return False
