"""Run code of the user or of a host library, and catch its exceptions. This is the only place that does.

Errors of this package are not refusals: `attempt` logs them with the path of the part, which stays unchanged. With
`HF_CPU_ACCEL_STRICT=1`, as in the tests, it raises them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from hf_cpu_accel.patching.fused_module import CannotStandIn
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused

P = ParamSpec("P")
T = TypeVar("T")

STRICT = "HF_CPU_ACCEL_STRICT"
_LONGEST = 120

logger = logging.getLogger("hf_cpu_accel.rewrite")


class OwnError(BaseException):
    """An error of this package below foreign code, which no `except Exception` of that code catches."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def ours() -> Iterator[None]:
    """Mark the code of a hook, a mode or a stand-in that foreign code calls.

    Raises:
        OwnError: in the place of what is raised inside.
    """
    try:
        yield
    except Exception as error:
        raise OwnError(error) from error


def call_foreign(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any | Refusal:
    """Return `function(*args, **kwargs)`, or a refusal that names the exception if it raises one.

    Raises:
        MemoryError: there is none left, which is no answer.
    """
    try:
        return function(*args, **kwargs)
    except MemoryError:
        raise
    except Exception as error:  # unknown code: any exception means that it rejects the arguments
        first = next(iter(str(error).splitlines()), "")[:_LONGEST]
        return Refusal(f"{_name(function)} raised {type(error).__name__}" + (f": {first}" if first else ""))


def attempt(path: str, look: Callable[P, T | Refusal], *args: P.args, **kwargs: P.kwargs) -> T | Refusal:
    """Return `look(*args, **kwargs)`, code of this package, for the part at `path` of a model.

    Raises:
        Exception: what `look` raises, where `HF_CPU_ACCEL_STRICT=1` is set; else that is logged, and the part refused.
    """
    try:
        return look(*args, **kwargs)
    except Refused as refused:
        return refused.refusal
    except CannotStandIn as reason:
        return Refusal(str(reason))
    except MemoryError:
        raise
    except OwnError as error:
        return error.error.refusal if isinstance(error.error, Refused) else _log_own_error(path, error.error)
    except Exception as error:
        return _log_own_error(path, error)


def is_strict() -> bool:
    """Return whether errors of this package are raised to the user."""
    return os.environ.get(STRICT) == "1"


def _log_own_error(path: str, error: Exception) -> Refusal:
    if is_strict():
        raise error
    logger.warning(
        "hf_cpu_accel failed on %r and left it unchanged; please report this error", path, exc_info=error
    )
    return Refusal(f"hf_cpu_accel raised {type(error).__name__}; see the log")


def _name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of the module whose forward it is."""
    owner = getattr(function, "__self__", None)
    if owner is not None and getattr(function, "__name__", "") == "forward":
        return type(owner).__name__
    name: str = getattr(function, "__qualname__", type(function).__name__)
    return name
