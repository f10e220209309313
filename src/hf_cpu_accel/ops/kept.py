"""Arguments that the C++ library stores between calls under a number, owned by Python objects."""

from __future__ import annotations

from typing import Any

import torch

from hf_cpu_accel import extension
from hf_cpu_accel.runtime.tracing import untraced

_OPS: Any = torch.ops.hf_cpu_accel


class Kept:
    """Arguments stored by the op `keep_<what>` until this object is deleted. It cannot be copied or pickled.

    Attributes:
        number: the argument of the ops that read them, valid in this process.
    """

    def __init__(self, what: str, *arguments: Any) -> None:
        """
        Args:
            what: the suffix of the ops' names.
            arguments: of `keep_<what>`.
        """
        self._drop = getattr(_OPS, f"drop_{what}")
        with untraced():
            self.number: int = getattr(_OPS, f"keep_{what}")(*arguments)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            with untraced():  # the garbage collector may run during a trace, which must not record this
                self._drop(self.number)

    def __reduce__(self) -> Any:
        raise TypeError(
            "arguments stored in the library are not copied or pickled; create a new object from the same arguments"
        )


def can_keep(what: str) -> bool:
    """Return whether the library is loaded and has the op `keep_<what>`."""
    extension.status()
    return hasattr(_OPS, f"keep_{what}")
