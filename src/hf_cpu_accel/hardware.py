"""Deprecated: the same names are in `hf_cpu_accel.runtime.hardware`."""

import warnings
from typing import Any

from hf_cpu_accel.runtime import hardware


def __getattr__(name: str) -> Any:
    value = getattr(hardware, name)
    warnings.warn(
        f"hf_cpu_accel.hardware.{name} has moved to hf_cpu_accel.runtime.hardware",
        DeprecationWarning,
        stacklevel=2,
    )
    return value
