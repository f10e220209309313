"""The hot path: the provider of an op for a number of rows, in one look-up."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.providers import choice as choices
from hf_cpu_accel.providers.autotune import NATIVE
from hf_cpu_accel.providers.choice import FEWEST_ROWS, Run, Work, row_range
from hf_cpu_accel.providers.store import Choice
from hf_cpu_accel.providers.torch_ops import provider_named
from hf_cpu_accel.runtime.context import within
from hf_cpu_accel.runtime.tracing import is_tracing

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Setting = tuple[torch.dtype, int]  # of the input; threads
_Table = dict[int, Run]  # by the logarithm of the range's last row count
_undecided: ContextVar[bool] = ContextVar("undecided", default=False)


def deciding_nothing() -> AbstractContextManager[None]:
    """Inside, undecided routes use this package's kernels and measure nothing, for tracing a model."""
    return within(_undecided, True)


class Route:
    """Runs `work` on this package's kernels, or by the provider that is faster for the number of rows.

    While a graph is traced, and for fake or wrapped tensors, it always runs the op of this package: other ops have no stable fake
    kernels, and their weights cannot be exported.

    Args:
        work: the call; its first input has the rows and the dtype.
        measured: False to always use this package's kernels.
    """

    def __init__(self, work: Work, *, measured: bool) -> None:
        self.work = work
        self.measured = measured
        self._tables: dict[_Setting, _Table] = {}
        self._current: tuple[_Setting | None, _Table] = (None, {})

    def __call__(self, input: Tensor, *rest: Tensor) -> Any:
        if not self.measured or torch.compiler.is_compiling():
            return self.work.own(input, *rest)
        rows = input.numel() // self.work.in_features
        if type(rows) is not int or rows < FEWEST_ROWS:  # a symbolic number has no range
            return self.work.own(input, *rest)
        # One attribute for both, so that threads with different settings do not read each other's table.
        setting, table = self._current
        if setting != (input.dtype, torch.get_num_threads()):
            table = self._switch((input.dtype, torch.get_num_threads()))
        run = table.get((rows - 1).bit_length())
        if run is None:
            run = self._decide(rows, input, table)
        return run(input, *rest)

    def choice(self, rows: int, dtype: torch.dtype) -> Choice | None:
        """Return the choice for `rows` rows of that dtype, measured if needed; None if it is not known yet."""
        if not self.measured or rows < FEWEST_ROWS or is_tracing() or _undecided.get():
            return None
        return choices.chooser().choose(self.work, rows, dtype)

    def elsewhere(self) -> dict[tuple[int, int], str]:
        """Return {(first, last) row count: provider}, sorted by rows, for the ranges that another provider computes now."""
        return {
            row_range(1 << log2): run.provider
            for log2, run in sorted(self._current[1].items())
            if isinstance(run, _Foreign)
        }

    def _decide(self, rows: int, input: Tensor, table: _Table) -> Run:
        if _undecided.get():
            return self.work.own
        choice = self.choice(rows, input.dtype) if type(input) in _PLAIN else None
        if choice is None:
            return self.work.own
        run: Run = self.work.own
        if choice.provider != NATIVE:
            run = self._foreign(choice.provider) or run
        table[(rows - 1).bit_length()] = run
        return run

    def _foreign(self, name: str) -> Run | None:
        """Return the run of another provider; None if it no longer works, or its copies do not fit in memory."""
        provider = provider_named(name, self.work.dtype)
        if provider is None:
            return None
        try:
            return _Foreign(name, self.work.by(provider), self.work.own)
        except MemoryError:
            return None

    def _switch(self, setting: _Setting) -> _Table:
        table = self._tables.setdefault(setting, {})
        self._current = (setting, table)
        return table


class _Foreign:
    """The run of another provider, or of this package where the other must not be used."""

    def __init__(self, provider: str, run: Run, own: Run) -> None:
        self.provider = provider
        self._run = run
        self._own = own

    def __call__(self, input: Tensor, *rest: Tensor) -> Any:
        plain = type(input) in _PLAIN and not is_tracing() and not torch.is_autocast_enabled("cpu")
        return self._run(input, *rest) if plain else self._own(input, *rest)
