"""Setting a context variable for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, `variable` has the value `value` for calls of this thread."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
