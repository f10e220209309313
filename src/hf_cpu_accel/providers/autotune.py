"""Interleaved timing of the own kernels against other providers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

NATIVE = "own"

# A provider must be this much faster to be used: a smaller speedup is not worth a second copy of the weight.
MARGIN = 0.03
# A candidate this much slower after one round is dropped, so a measurement rarely takes more than two calls of each.
_HOPELESS = 1.15
_ROUNDS = 5
# A call shorter than this is repeated within a round, so that the clock and the scheduler matter less.
_ROUND_SECONDS = 3e-4
# If the median of the own rounds is this many times the best one, the machine was busy, and the result is not stored.
_NOISY = 1.3


@dataclass(frozen=True)
class Result:
    """The result of a measurement.

    Attributes:
        winner: `NATIVE` or the name of a provider.
        seconds: the best time of one call, by name.
        steady: whether the times are reliable enough to be stored.
    """

    winner: str
    seconds: dict[str, float]
    steady: bool


def autotune(
    candidates: Mapping[str, Callable[[], object]], *, clock: Callable[[], float] = time.perf_counter
) -> Result:
    """Run all candidates in turn, with the order reversed in every other round, and compare their times.

    Another candidate than `NATIVE` wins if its best time is more than `MARGIN` below that of `NATIVE`, and its median is below the
    best time of `NATIVE`. On a busy machine, where times vary, only a much faster candidate wins.

    Args:
        candidates: `NATIVE` and any others, by name; each runs the work once.
        clock: returns seconds.
    """
    repeats = {}
    for name, run in candidates.items():
        run()  # the first call allocates, and creates oneDNN's primitive
        seconds = _time(run, 1, clock)
        repeats[name] = max(1, min(20, math.ceil(_ROUND_SECONDS / max(seconds, 1e-9))))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    running = list(candidates)
    for turn in range(_ROUNDS):
        for name in running if turn % 2 == 0 else reversed(running):
            times[name].append(_time(candidates[name], repeats[name], clock))
        best = {name: min(times[name]) for name in running}
        running = [name for name in running if name == NATIVE or best[name] < _HOPELESS * best[NATIVE]]
        if running == [NATIVE]:
            break
    best = {name: min(times[name]) for name in candidates}
    least = min(times[NATIVE])
    clear = [n for n in running if min(times[n]) < (1 - MARGIN) * least and median(times[n]) < least]
    ahead = [name for name in clear if name != NATIVE]
    winner = min(ahead, key=best.__getitem__, default=NATIVE)
    return Result(winner, best, steady=median(times[NATIVE]) <= _NOISY * best[NATIVE])


def _time(run: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        run()
    return (clock() - start) / repeats
