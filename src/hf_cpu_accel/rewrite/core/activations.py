"""Identify activations by their values, since class names differ between libraries."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.tolerance import ACTIVATION

# Dense where activations differ from one another, and far enough out to tell the clipped ones.
GRID = torch.cat((torch.linspace(-12.0, 12.0, 1201), torch.tensor([-1e3, -50.0, 50.0, 1e3])))


def identify(function: Callable[[Tensor], Tensor]) -> str | None:
    """Return the name in `ops.linear.ACTIVATIONS` of `function`, `"none"` for the identity, or None for a function that matches
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
            if compare(values, reference(GRID)).within(ACTIVATION):
                return name
    return None


def is_library_function(function: object) -> bool:
    """Return whether `function` is defined by torch or transformers. A callback of the user must not be called to identify it."""
    return callable(function) and str(getattr(function, "__module__", "")).split(".")[0] in (
        "torch",
        "transformers",
    )


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None
