"""Compare outputs with a reference. The bounds are in `hf_cpu_accel.tolerance`."""

from hf_cpu_accel.check.comparison import (
    DISAGREES,
    Agreement,
    Comparison,
    compare,
    float_tensors,
    is_rounding,
    row_error,
)

__all__ = [
    "DISAGREES",
    "Agreement",
    "Comparison",
    "compare",
    "float_tensors",
    "is_rounding",
    "row_error",
]
