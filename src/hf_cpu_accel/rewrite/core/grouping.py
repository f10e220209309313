"""Switch off the joint computation of sibling linears that share an input, while a trace records a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hf_cpu_accel.providers.route import deciding_nothing
from hf_cpu_accel.runtime.context import within

GROUPING_DISABLED: ContextVar[bool] = ContextVar("GROUPING_DISABLED", default=False)


@contextmanager
def disable_grouping() -> Iterator[None]:
    """Compute every linear separately, by the kernels of this package, and record nothing."""
    with within(GROUPING_DISABLED, True), deciding_nothing():
        yield
