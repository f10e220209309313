"""(work, rows) -> who serves it: from memory, from disk, or by measuring."""

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

# Below this many rows a layer takes the time of reading its weight from memory and of calling it. Measuring, with the weight
# warm in the cache, says nothing about the first, and in the second we are ahead. It also keeps the few rows on which
# replacements are verified from being measured.
FEWEST_ROWS = 9
# All row counts from here on are one range: the product no longer cares.
LARGEST_RANGE = (1025, 2048)
# Measured on fewer rows than the range's if it would take longer than this many operations per thread a call: 3 to 10 ms.
_OPERATIONS = 5e8
_FEWEST_MEASURED_ROWS = 64
# A measurement that is over after its first round calls each candidate so often.
_CALLS_AHEAD = 3

Run = Callable[..., Any]


class Work(Protocol):
    """One call of an op of ours, that others can do too.

    Attributes:
        key: names op, dtype of the weight, N and K: works with the same key take the same time.
        dtype: of the packed weight.
        in_features: K.
        products: multiply-adds for one row.
    """

    key: str
    dtype: str
    in_features: int
    products: int

    @property
    def own(self) -> Run:
        """The work on our kernels."""

    def by(self, provider: Provider) -> Run:
        """The same by another provider, which gets copies of the weights; they live as long as what is returned.

        Raises:
            MemoryError: there is no room for copies.
        """

    def sample(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Random inputs of `rows` rows."""


def row_range(rows: int) -> tuple[int, int]:
    """The (first, last) row count of the range that `rows` is in: up to a power of two, 1025 and more together."""
    if rows >= LARGEST_RANGE[0]:
        return LARGEST_RANGE
    last = 1 << (rows - 1).bit_length() if rows > 1 else 1
    return last // 2 + 1, last


@dataclass(frozen=True)
class Contest:
    """What is measured.

    Attributes:
        own: does the work once, our way.
        others: by name, what makes the others, who may need copies of weights.
    """

    own: Callable[[], object]
    others: Mapping[str, Callable[[], Callable[[], object]]]


class Chooser:
    """Choices for this process.

    Safe under threads: only one measures at a time, and the others use our kernels until it is done.

    Args:
        store: threads -> the choices on disk for that number of threads.
        autotune, find_candidates, budget, is_busy, clock: what to measure, how, and for how long; for tests.
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
        """Who serves `work` for the range of `rows`; None if that is not known and could not be measured now.

        Args:
            dtype: of the input.
        """
        range_ = f"{str(dtype).removeprefix('torch.')} rows<={row_range(rows)[1]}"
        measured_rows = measured_rows_of(work, rows, torch.get_num_threads())
        return self.decide(
            f"{work.key} {range_}", measured_rows, lambda: self._contest(work, measured_rows, dtype)
        )

    def decide(self, key: str, rows: int, contest: Callable[[], Contest]) -> Choice | None:
        """Who wins `contest`; None if that is not known and could not be measured now.

        Args:
            key: names the work and its sizes; contests with the same key take the same time.
            rows: that are measured, for the record.
            contest: makes it, where it must be held.
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
        """Whether there is time left for a measurement."""
        return self._budget.left() > 0

    def store(self, threads: int) -> Store:
        """The choices on disk for that number of threads."""
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
            held = contest()
            if not held.others:
                return self._remember(key, threads, Choice(NATIVE, {}, 0))
            start = self._clock()
            held.own()
            needed = (self._clock() - start) * _CALLS_AHEAD * (1 + len(held.others))
            if needed > left:
                self._needed[key] = needed
                return None
            result = self._autotune(_candidates(held))
        choice = self._remember(key, threads, Choice(result.winner, result.seconds, rows))
        if result.steady and not self._is_busy():
            # Another process may have been first: then its answer is the machine's.
            choice = self._remember(key, threads, self.store(threads).add({key: choice})[key])
        return choice

    def _remember(self, key: str, threads: int, choice: Choice) -> Choice:
        self._known[threads][key] = choice
        return choice


def measured_rows_of(work: Work, rows: int, threads: int) -> int:
    """How many rows are measured for the range of `rows`: its last, or fewer where one call would take too long."""
    last = row_range(rows)[1]
    affordable = int(_OPERATIONS * threads / (2 * max(1, work.products)))
    return min(last, max(_FEWEST_MEASURED_ROWS, 1 << (max(1, affordable).bit_length() - 1)))


def _candidates(contest: Contest) -> dict[str, Callable[[], object]]:
    """Ours, and the others for whose copies there is room."""
    runs = {NATIVE: contest.own}
    for name, make in contest.others.items():
        with suppress(MemoryError):
            runs[name] = make()
    return runs


def _by(work: Work, provider: Provider, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    return partial(work.by(provider), *inputs)


@lru_cache(maxsize=1)
def chooser() -> Chooser:
    """The one of this process, with its store in the home folder."""
    return Chooser(lambda threads: Store(store_folder(), machine_key(threads)))


def store_folder() -> Path:
    return cache_folder("providers")
