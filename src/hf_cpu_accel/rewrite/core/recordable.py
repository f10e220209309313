"""Functions of this package that host code calls and that a recorder records as one step each (`rewrite/capture/recorder.py`)."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

# (function, args, kwargs) -> the output of the function.
RECORDER: ContextVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None] = ContextVar(
    "RECORDER", default=None
)


def recordable(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` such that a recorder records the call and not the ops inside."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Dynamo cannot read context variables, and records by itself.
        recorder = None if torch.compiler.is_compiling() else RECORDER.get()
        if recorder is None:
            return function(*args, **kwargs)
        noted: T = recorder(function, args, kwargs)
        return noted

    return call
