"""Deprecated: use `hf_cpu_accel.runtime.hardware`, which has the same names."""

import warnings
from typing import Any

from hf_cpu_accel.runtime import hardware


def __getattr__(name: str) -> Any:
    value = getattr(hardware, name)
    warnings.warn(
        f"hf_cpu_accel.hardware.{name} is deprecated; use hf_cpu_accel.runtime.hardware.{name}",
        DeprecationWarning,
        stacklevel=2,
    )
    return value
