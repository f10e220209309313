"""Interleaved timing and its statistics.

The clock, the memory and the neighbors of a cloud machine drift by tens of per cent over minutes, so two systems timed one after
the other are not comparable. Here they take turns in short bursts, A B C, then C B A, and the result is the ratio inside each
round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A median and its confidence interval for `CONFIDENCE`, if there are enough samples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one system: one inner tuple per burst, in the order of the rounds."""

    rounds: tuple[tuple[float, ...], ...]

    @property
    def round_medians(self) -> tuple[float, ...]:
        """The median seconds of each burst. Calls inside a burst are correlated, bursts far less."""
        return tuple(statistics.median(calls) for calls in self.rounds)

    @property
    def seconds(self) -> Estimate:
        """The median over rounds of the burst medians."""
        return median_estimate(self.round_medians)

    @property
    def best(self) -> float:
        """The seconds of the fastest single call."""
        return min(min(calls) for calls in self.rounds)


def median_estimate(samples: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the median with its distribution-free interval from order statistics.

    [x_(k), x_(n+1-k)] covers the median with probability 1 - 2 P(Binomial(n, 1/2) < k) (Conover, Practical Nonparametric
    Statistics, sign test); k is the largest with at least `confidence`. With fewer than six samples there is none for 95 %, and the
    interval is the full range.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("samples is empty; measure at least one round")
    ordered = sorted(samples)
    n = len(ordered)
    k, below = 1, 1.0  # below = 2^n P(Binomial(n, 1/2) < k)
    while 2 * (below + math.comb(n, k)) <= (1 - confidence) * 2.0**n:
        below += math.comb(n, k)
        k += 1
    return Estimate(statistics.median(ordered), ordered[k - 1], ordered[n - k])


def speedup(base: Timing, other: Timing) -> Estimate:
    """Return the speedup of `other` over `base`: the median of the ratios inside each round.

    Raises:
        ValueError: the two were not measured over the same rounds.
    """
    if len(base.rounds) != len(other.rounds):
        raise ValueError(
            f"base has {len(base.rounds)} rounds, other {len(other.rounds)}; use one interleaved() call"
        )
    pairs = zip(base.round_medians, other.round_medians, strict=True)
    return median_estimate([slow / fast for slow, fast in pairs])


def burst(call: Callable[[], object], *, calls: int, seconds: float) -> tuple[float, ...]:
    """Return the seconds of each call of a burst of at least `calls` calls and at least `seconds` in total.

    A first call is not recorded: it fills the caches after the system before.
    """
    call()
    times: list[float] = []
    spent = 0.0
    while len(times) < calls or spent < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        spent += times[-1]
    return tuple(times)


def interleaved(
    systems: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 3,
    seconds: float = 0.0,
    on_burst: Callable[[str], None] | None = None,
) -> dict[str, Timing]:
    """Time callables in turns, A B C, C B A, ...

    Args:
        systems: {name: callable without arguments that returns when its work is done}.
        rounds: the number of bursts per system, at least 1.
        calls, seconds: the minimum size of a burst, see `burst`.
        on_burst: called with the system's name after each burst (progress bars).

    Raises:
        ValueError: `rounds` or `calls` is below 1.
    """
    if rounds < 1 or calls < 1:
        raise ValueError(f"rounds={rounds}, calls={calls}: both must be at least 1")
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in systems}
    order = list(systems)
    for _ in range(rounds):
        for name in order:
            taken[name].append(burst(systems[name], calls=calls, seconds=seconds))
            if on_burst is not None:
                on_burst(name)
        order.reverse()
    return {name: Timing(tuple(bursts)) for name, bursts in taken.items()}
