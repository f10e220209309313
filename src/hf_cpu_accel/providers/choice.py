"""(work, rows) -> the fastest provider: from memory, from disk, or by measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_cpu_accel.ops.derivatives import in_transform
from hf_cpu_accel.providers.autotune import NATIVE, Result, autotune
from hf_cpu_accel.providers.budget import Budget
from hf_cpu_accel.providers.machine import is_busy, machine_key
from hf_cpu_accel.providers.store import Choice, Store
from hf_cpu_accel.providers.torch_ops import Provider, candidates
from hf_cpu_accel.runtime.fork import new_lock
from hf_cpu_accel.runtime.home_folder import cache_folder

# Below this many rows a layer takes the time of reading its weight from memory and of the call. A measurement has the weight in the
# cache, so it cannot show the first, and the own kernels win the second. This also excludes the few rows of verification, and
# those of drafted tokens, which must get the same sums as each of them alone.
FEWEST_ROWS = 17
# All row counts from here on are one range, because the ratio of times no longer changes.
LARGEST_RANGE = (1025, 2048)
# Fewer rows than the range's are measured if a call would take more than this many operations per thread: 3 to 10 ms.
_OPERATIONS = 5e8
_FEWEST_MEASURED_ROWS = 64
# The number of calls per candidate of a measurement that ends after its first round.
_CALLS_AHEAD = 3

Run = Callable[..., Any]


class Work(Protocol):
    """One call of an op that other providers can compute too.

    Attributes:
        key: the op, the dtype of the weight, N and K: works with the same key take the same time.
        dtype: the dtype of the packed weight.
        in_features: K.
        products: the multiply-adds for one row.
    """

    key: str
    dtype: str
    in_features: int
    products: int

    @property
    def own(self) -> Run:
        """The work on this package's kernels."""

    def by(self, provider: Provider) -> Run:
        """Return the work by another provider, with copies of the weights that live as long as the returned function.

        Raises:
            MemoryError: there is no room for copies.
        """

    def sample(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return random inputs of `rows` rows."""


def row_range(rows: int) -> tuple[int, int]:
    """Return the (first, last) row count of the range of `rows`: up to a power of two, and 1025 or more together."""
    if rows >= LARGEST_RANGE[0]:
        return LARGEST_RANGE
    last = 1 << (rows - 1).bit_length() if rows > 1 else 1
    return last // 2 + 1, last


@dataclass(frozen=True)
class Contest:
    """The candidates of a measurement.

    Attributes:
        own: runs the work once on this package's kernels.
        others: {provider: function that prepares it, possibly with copies of weights, and returns a function that runs the work}.
    """

    own: Callable[[], object]
    others: Mapping[str, Callable[[], Callable[[], object]]]


class Chooser:
    """The choices of this process.

    Thread-safe: one thread measures at a time, and the others use this package's kernels meanwhile.

    Args:
        store: a function from the number of threads to the choices on disk.
        autotune, find_candidates, budget, is_busy, clock: replacements for tests.
    """

    def __init__(
        self,
        store: Callable[[int], Store],
        *,
        autotune: Callable[[dict[str, Callable[[], object]]], Result] = autotune,
        find_candidates: Callable[[str], Sequence[Provider]] = candidates,
        budget: Budget | None = None,
        is_busy: Callable[[], bool] = is_busy,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._make_store = store
        self._autotune = autotune
        self._candidates = find_candidates
        self._budget = Budget() if budget is None else budget
        self._is_busy = is_busy
        self._clock = clock
        self._lock = new_lock()
        self._stores: dict[int, Store] = {}
        self._known: dict[int, dict[str, Choice]] = {}
        self._needed: dict[
            str, float
        ] = {}  # seconds that a measurement that did not fit into the budget would take

    def choose(self, work: Work, rows: int, dtype: torch.dtype) -> Choice | None:
        """Return the choice for `work` in the range of `rows`; None if it is unknown and cannot be measured now.

        Args:
            work: the call.
            rows: of the input.
            dtype: of the input.
        """
        range_ = f"{str(dtype).removeprefix('torch.')} rows<={row_range(rows)[1]}"
        measured_rows = measured_rows_of(work, rows, torch.get_num_threads())
        return self.decide(
            f"{work.key} {range_}", measured_rows, lambda: self._contest(work, measured_rows, dtype)
        )

    def decide(self, key: str, rows: int, contest: Callable[[], Contest]) -> Choice | None:
        """Return the winner of `contest`; None if it is unknown and cannot be measured now.

        Args:
            key: the work and its sizes; contests with the same key take the same time.
            rows: the measured rows, for the record.
            contest: creates the contest if it must be measured.
        """
        threads = torch.get_num_threads()
        choice = self._known.get(threads, {}).get(key)
        if choice is not None or in_transform() or not self._lock.acquire(blocking=False):
            return choice
        start = self._clock()
        try:
            return self._look_up(key, threads) or self._measure(contest, key, rows, threads)
        finally:
            self._budget.spend(self._clock() - start)
            self._lock.release()

    def can_measure(self) -> bool:
        """Return whether the budget allows a measurement."""
        return self._budget.left() > 0

    def store(self, threads: int) -> Store:
        """Return the choices on disk for that number of threads."""
        if threads not in self._stores:
            self._stores[threads] = self._make_store(threads)
        return self._stores[threads]

    def _look_up(self, key: str, threads: int) -> Choice | None:
        if threads not in self._known:
            self._known[threads] = self.store(threads).load()
        return self._known[threads].get(key)

    def _contest(self, work: Work, rows: int, dtype: torch.dtype) -> Contest:
        providers = self._candidates(work.dtype)
        inputs = work.sample(rows, dtype) if providers else ()
        others = {provider.name: partial(_by, work, provider, inputs) for provider in providers}
        return Contest(partial(work.own, *inputs), others)

    def _measure(self, contest: Callable[[], Contest], key: str, rows: int, threads: int) -> Choice | None:
        left = self._budget.left()
        if left <= self._needed.get(key, 0.0):
            return None
        with torch.no_grad():
            race = contest()
            if not race.others:
                return self._remember(key, threads, Choice(NATIVE, {}, 0))
            start = self._clock()
            race.own()
            needed = (self._clock() - start) * _CALLS_AHEAD * (1 + len(race.others))
            if needed > left:
                self._needed[key] = needed
                return None
            result = self._autotune(_candidates(race))
        choice = self._remember(key, threads, Choice(result.winner, result.seconds, rows))
        if result.steady and not self._is_busy():
            # If another process has stored a choice first, all processes use that one.
            choice = self._remember(key, threads, self.store(threads).add({key: choice})[key])
        return choice

    def _remember(self, key: str, threads: int, choice: Choice) -> Choice:
        self._known[threads][key] = choice
        return choice


def measured_rows_of(work: Work, rows: int, threads: int) -> int:
    """Return the number of rows to measure for the range of `rows`: its last, or fewer if a call would take too long."""
    last = row_range(rows)[1]
    affordable = int(_OPERATIONS * threads / (2 * max(1, work.products)))
    return min(last, max(_FEWEST_MEASURED_ROWS, 1 << (max(1, affordable).bit_length() - 1)))


def _candidates(contest: Contest) -> dict[str, Callable[[], object]]:
    """Return the own kernels, and the other providers whose copies fit in memory."""
    runs = {NATIVE: contest.own}
    for name, make in contest.others.items():
        with suppress(MemoryError):
            runs[name] = make()
    return runs


def _by(work: Work, provider: Provider, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    return partial(work.by(provider), *inputs)


@lru_cache(maxsize=1)
def chooser() -> Chooser:
    """Return the chooser of this process, with its store in the home folder."""
    return Chooser(lambda threads: Store(store_folder(), machine_key(threads)))


def store_folder() -> Path:
    return cache_folder("providers")
