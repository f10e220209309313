"""Whether sibling linears that share an input may be computed together: not while a trace records what a model does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hf_cpu_accel.providers.route import deciding_nothing
from hf_cpu_accel.runtime.context import within

GROUPING_DISABLED: ContextVar[bool] = ContextVar("GROUPING_DISABLED", default=False)


@contextmanager
def disable_grouping() -> Iterator[None]:
    """Compute every linear on its own, by our kernels, and record nothing."""
    with within(GROUPING_DISABLED, True), deciding_nothing():
        yield
