"""Hold packed weights that calibration rounded before the rules run; the rules use them instead of packing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar

from torch import Tensor

from hf_cpu_accel.packing.linear import PackedWeight, concat
from hf_cpu_accel.runtime.context import within


class CalibratedWeights:
    """Packed weights of single linears, by their parameters."""

    def __init__(self) -> None:
        self._of: dict[int, PackedWeight] = {}

    def __len__(self) -> int:
        return len(self._of)

    def keep(self, parameter: Tensor, packed: PackedWeight) -> None:
        self._of[parameter.data_ptr()] = packed

    def of(self, parameters: Sequence[Tensor]) -> PackedWeight | None:
        """Return one packed weight of all `parameters`, or None if one of them has none.

        Raises:
            ValueError: they were rounded to different forms.
        """
        packed = [self._of.get(parameter.data_ptr()) for parameter in parameters]
        found = [weight for weight in packed if weight is not None]
        if not found or len(found) < len(packed):
            return None
        return found[0] if len(found) == 1 else concat(found)


_current: ContextVar[CalibratedWeights | None] = ContextVar("calibrated weights", default=None)


def use_calibrated_weights() -> AbstractContextManager[None]:
    """Make rules use the packed weights that are added to `calibrated_weights()` inside the context."""
    return within(_current, CalibratedWeights())


def calibrated_weights() -> CalibratedWeights:
    """Return the packed weights of the current rewrite."""
    weights = _current.get()
    assert weights is not None
    return weights


def calibrated_weight(parameters: Sequence[Tensor], dtype: str) -> PackedWeight | None:
    """Return the calibrated packed weight of all `parameters` if `dtype` is int4 and there is one, else None."""
    current = _current.get()
    return None if current is None or dtype != "int4" else current.of(parameters)
