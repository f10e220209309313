"""Decide whether a compiled form replaces level 1: its output agrees, and it is faster for inputs of about this size."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.measure.agreement import compare
from hf_cpu_accel.tolerance import COMPILED_DIRECTION, COMPILED_ERROR

PAIRS = 5  # measurements before the decision
GAIN = 1.03  # a smaller speedup does not pay for the guards


class Verdict:
    """Attributes:
    faster: whether the compiled form is faster, or None before the decision.
    """

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=PAIRS)
        self.faster: bool | None = None

    def add(self, level_one: float, compiled: float) -> None:
        """Add the times of the same call in both forms, in seconds."""
        self._pairs.append((level_one, compiled))
        if len(self._pairs) == PAIRS and self.faster is None:
            self.faster = self.gain >= GAIN

    @property
    def gain(self) -> float:
        """The speedup of the compiled form, the median of the measured pairs; nan before the first."""
        return median(slow / fast for slow, fast in self._pairs) if self._pairs else float("nan")


def disagreement(output: Any, reference: Any, dtype: str) -> str | None:
    """Return how `output` differs from `reference` by more than rounding, or None.

    Args:
        dtype: the dtype of the packed weights, one of `packing.DTYPES`.
    """
    if type(output) is not type(reference):
        return f"a {type(output).__name__} instead of a {type(reference).__name__}"
    if isinstance(reference, Tensor):
        return _difference(output, reference, dtype)
    if isinstance(reference, Mapping):
        if list(output) != list(reference):
            return "different names of outputs"
        return _first(disagreement(output[name], reference[name], dtype) for name in reference)
    if isinstance(reference, tuple | list):
        if len(output) != len(reference):
            return "a different number of outputs"
        return _first(disagreement(*pair, dtype) for pair in zip(output, reference, strict=True))
    return None if output == reference else "a different constant"


def _first(reasons: Any) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _difference(output: Tensor, reference: Tensor, dtype: str) -> str | None:
    if (output.dtype, output.shape) != (reference.dtype, reference.shape):
        return f"{output.dtype} {list(output.shape)} instead of {reference.dtype} {list(reference.shape)}"
    if not reference.is_floating_point():
        return None if torch.equal(output, reference) else "different values"
    if not bool(torch.isfinite(reference).all()):
        return (
            None if torch.equal(output.isfinite(), reference.isfinite()) else "different values are infinite"
        )
    agreement = compare([output], [reference])
    if dtype == "float32" and reference.dtype is torch.bfloat16:
        dtype = "bfloat16"
    distance, error = 1 - agreement.worst_cosine, agreement.max_relative_error
    if distance > COMPILED_DIRECTION.of(dtype) or error > COMPILED_ERROR.of(dtype):
        return f"cosine {agreement.worst_cosine:.5f}, error {error:.1e}"
    return None
