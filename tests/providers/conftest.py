"""Choices without clocks: measurements whose winner a test decides, and a store in a temporary folder."""

from __future__ import annotations

from typing import Any

import pytest

from hf_cpu_accel.providers import choice
from hf_cpu_accel.providers.autotune import NATIVE, Result
from hf_cpu_accel.providers.budget import Budget
from hf_cpu_accel.providers.choice import Chooser
from hf_cpu_accel.providers.store import Store
from hf_cpu_accel.providers.switch import VARIABLE

MACHINE = {"cpu": "test"}


class Measurements:
    """Stands for `autotune`: runs each once; `winner` wins where it takes part, by `seconds` twice as fast as the others."""

    def __init__(self, winner: str = NATIVE, *, steady: bool = True) -> None:
        self.winner = winner
        self.steady = steady
        self.seconds: dict[str, float] = {}
        self.held: list[list[str]] = []

    def __call__(self, candidates):
        for run in candidates.values():
            run()
        self.held.append(list(candidates))
        winner = self.winner if self.winner in candidates else NATIVE
        times = {name: 1e-3 if name == winner else 2e-3 for name in candidates}
        return Result(winner, times | self.seconds, self.steady)


def make_chooser(folder, measurements, **options):
    """A chooser whose budget never runs out, unless `options` have another."""
    # The clock stands still: what a machine under load takes for its first call decides nothing.
    options = {"budget": Budget(lambda: 0.0), "clock": lambda: 0.0, "is_busy": lambda: False} | options
    return Chooser(
        lambda threads: Store(folder, {**MACHINE, "threads": threads}), autotune=measurements, **options
    )


@pytest.fixture
def force(monkeypatch, tmp_path):
    """force(name, **options of `Chooser`): from now on that provider wins wherever it takes part; gives the measurements."""
    monkeypatch.setenv(VARIABLE, "auto")

    def to(winner: str, **options: Any) -> Measurements:
        measurements = Measurements(winner)
        made = make_chooser(tmp_path / winner, measurements, **options)
        monkeypatch.setattr(choice, "chooser", lambda: made)
        return measurements

    return to
