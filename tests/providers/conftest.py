"""Choices without clocks: races whose winner a test decides, and a store in a temporary folder."""

from __future__ import annotations

import pytest

from hf_cpu_accel.providers import choice
from hf_cpu_accel.providers.budget import Budget
from hf_cpu_accel.providers.choice import Chooser
from hf_cpu_accel.providers.race import OWN, Result
from hf_cpu_accel.providers.store import Store
from hf_cpu_accel.providers.switch import VARIABLE

MACHINE = {"cpu": "test"}


class Races:
    """Stands for `race`: runs everybody once, and `winner` wins where it takes part, by `seconds` twice as fast as the others."""

    def __init__(self, winner: str = OWN, *, steady: bool = True) -> None:
        self.winner = winner
        self.steady = steady
        self.seconds: dict[str, float] = {}
        self.held: list[list[str]] = []

    def __call__(self, contestants):
        for run in contestants.values():
            run()
        self.held.append(list(contestants))
        winner = self.winner if self.winner in contestants else OWN
        times = {name: 1e-3 if name == winner else 2e-3 for name in contestants}
        return Result(winner, times | self.seconds, self.steady)


def make_chooser(folder, races, **options):
    """A chooser whose budget never runs out, unless `options` have another."""
    # The clock stands still: what a machine under load takes for its first call decides nothing.
    options = {"budget": Budget(lambda: 0.0), "clock": lambda: 0.0, "is_busy": lambda: False} | options
    return Chooser(lambda threads: Store(folder, {**MACHINE, "threads": threads}), run_race=races, **options)


@pytest.fixture
def force(monkeypatch, tmp_path):
    """force(name): from now on that provider wins every race it takes part in; gives the races."""
    monkeypatch.setenv(VARIABLE, "auto")

    def to(winner: str) -> Races:
        races = Races(winner)
        made = make_chooser(tmp_path / winner, races)
        monkeypatch.setattr(choice, "chooser", lambda: made)
        return races

    return to
