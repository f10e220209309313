"""What the library keeps from one call to the next, under a number: Python objects that own it."""

from __future__ import annotations

from typing import Any

import torch

from hf_cpu_accel import extension
from hf_cpu_accel.runtime.tracing import untraced

_OPS: Any = torch.ops.hf_cpu_accel


class Kept:
    """Kept by the op `keep_<what>` until this is gone. A number of one process: not to be copied or pickled.

    Attributes:
        number: for the ops that use it.
    """

    def __init__(self, what: str, *arguments: Any) -> None:
        """
        Args:
            what: as in the ops' names.
            arguments: those of `keep_<what>`.
        """
        self._drop = getattr(_OPS, f"drop_{what}")
        with untraced():
            self.number: int = getattr(_OPS, f"keep_{what}")(*arguments)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            with untraced():  # the collector may run in the middle of a trace, which is not to record this
                self._drop(self.number)

    def __reduce__(self) -> Any:
        raise TypeError(
            "arguments stored in the library are not copied or pickled; create a new object from the same arguments"
        )


def can_keep(what: str) -> bool:
    """Whether there is a library, and it keeps that."""
    extension.status()
    return hasattr(_OPS, f"keep_{what}")
