"""Which activation is it? Told by its values, since class names differ from library to library."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.tolerance import ACTIVATION

# Dense where activations differ from one another, and far enough out to tell the clipped ones.
GRID = torch.cat((torch.linspace(-12.0, 12.0, 1201), torch.tensor([-1e3, -50.0, 50.0, 1e3])))


def identify(function: Callable[[Tensor], Tensor]) -> str | None:
    """The name in `ops.linear.ACTIVATIONS` of `function` (`"none"` for the identity), or None if its values agree with
    none of them.

    gelu and gelu_tanh differ by up to 5e-4, far above the tolerance. Modules with parameters are never identified.
    """
    if isinstance(function, nn.Module) and _has_state(function):
        return None
    with torch.no_grad():
        values = call_foreign(function, GRID.clone())
        if not isinstance(values, Tensor) or values.shape != GRID.shape:
            return None
        for name, reference in ACTIVATIONS.items():
            if ACTIVATION.holds(values, reference(GRID)):
                return name
    return None


def is_library_function(function: object) -> bool:
    """Of torch or transformers: a callback of the user's must not be called to see what it does."""
    return callable(function) and str(getattr(function, "__module__", "")).split(".")[0] in (
        "torch",
        "transformers",
    )


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None
