"""Measurements: interleaved timing, agreement of outputs, peak memory.

The command line (`hf-cpu-accel bench`, `demo`) and `benchmarks/` share them, so that their numbers mean the same.
"""

from hf_cpu_accel.measure.agreement import Agreement, compare
from hf_cpu_accel.measure.peak_memory import PeakMemory
from hf_cpu_accel.measure.timing import Estimate, Timing, burst, interleaved, median_estimate, speedup

__all__ = [
    "Agreement",
    "Estimate",
    "PeakMemory",
    "Timing",
    "burst",
    "compare",
    "interleaved",
    "median_estimate",
    "speedup",
]
