"""Drafters of tokens, the number of drafts that pays, and counts of drafted and accepted tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

SIZES = (1, 3, 7, 15)
"""Numbers of drafted tokens to choose from: with the token before them, 2, 4, 8 and 16 rows."""


class Drafter(Protocol):
    """A guess at the tokens that follow a text.

    Attributes:
        is_free: whether a draft costs next to nothing.
    """

    is_free: bool

    def append(self, token: int) -> None:
        """Add a token to the text."""

    def confidence(self) -> int:
        """Return how good the next draft is, 0 if there is none; drafts of the same confidence are accepted about as often."""

    def draft(self, count: int) -> list[int]:
        """Return the next `count` tokens, or fewer."""


@dataclass
class Speculation:
    """Counts of the drafts of one or more texts.

    Attributes:
        calls: calls of the model that verified drafts.
        drafted: tokens that were drafted in them.
        accepted: those of them that are part of the text.
    """

    calls: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Count one call."""
        self.calls += 1
        self.drafted += drafted
        self.accepted += accepted

    def __str__(self) -> str:
        return f"{self.accepted} of {self.drafted} drafted tokens accepted in {self.calls} calls"


_PRIOR_ACCEPTANCE = (0.0, 0.2, 0.4, 0.7, 0.9)  # by confidence; higher ones are like the last
_PRIOR_WEIGHT = 4.0  # as many observations
_FORGET = 0.97  # weight of what was observed one observation earlier
_PRIOR_COSTS = {
    0: 1.0,
    1: 1.15,
    3: 1.3,
    7: 1.7,
    15: 3.0,
}  # time of a call that verifies so many drafts / that of one without
_LEAST_GAIN = 1.03  # estimates have errors
_PROBES = 32  # tokens until a drafter that did not pay is tried again


class DraftLength:
    """Chooses how many tokens to draft: the number with the most tokens/s.

    With acceptance p per token, a call with n drafts gives (1 - p^(n+1)) / (1 - p) tokens on average (Leviathan et al. 2023,
    equation 1). p is estimated for each confidence, and the times of the calls are measured.

    Args:
        most: the maximum.
        is_free: whether a draft itself costs nothing.
    """

    def __init__(self, most: int, *, is_free: bool) -> None:
        self.sizes = (*(size for size in SIZES if size < most), min(most, SIZES[-1]))
        self._is_free = is_free
        self._observed: dict[int, tuple[float, float]] = {}  # by confidence: accepted, all
        self._seconds: dict[int, float] = {}  # of a call, by its number of drafts
        self._draft_seconds = 0.0  # of a draft of one token
        self._idle = 0  # tokens since the last draft

    def choose(self, confidence: int, room: int) -> int:
        """Return how many tokens to draft, 0 to `room`."""
        if confidence == 0:
            return 0
        acceptance = self.acceptance(confidence)
        best, best_rate = 0, _LEAST_GAIN / self._cost(0)
        for size in self.sizes:
            if size > room:
                break
            rate = expected_tokens(acceptance, size) / self._cost(size)
            if rate > best_rate:
                best, best_rate = size, rate
        if not self._is_free and best == 0 and room >= self.sizes[0]:
            self._idle += 1
            if self._idle >= _PROBES:
                best = self.sizes[0]
        if best:
            self._idle = 0
        return best

    def acceptance(self, confidence: int) -> float:
        """Return the estimated probability that a drafted token is accepted if all before it are."""
        prior = _PRIOR_ACCEPTANCE[min(confidence, len(_PRIOR_ACCEPTANCE) - 1)]
        accepted, observed = self._observed.get(confidence, (0.0, 0.0))
        return (accepted + _PRIOR_WEIGHT * prior) / (observed + _PRIOR_WEIGHT)

    def observe(self, confidence: int, drafted: int, accepted: int) -> None:
        """Learn from a draft whose first `accepted` tokens were right."""
        right, seen = self._observed.get(confidence, (0.0, 0.0))
        kept = _FORGET ** max(1, accepted)
        self._observed[confidence] = (
            right * kept + accepted,
            seen * kept + accepted + (accepted < drafted),
        )

    def measured(self, drafted: int, seconds: float) -> None:
        """Learn the time of a call that verified so many drafts."""
        known = self._seconds.get(drafted)
        # The lower quarter, roughly: other processes only make a call longer.
        if known is None:
            self._seconds[drafted] = seconds
        else:
            self._seconds[drafted] = known + (0.3 if seconds < known else 0.1) * (seconds - known)

    def measured_draft(self, tokens: int, seconds: float) -> None:
        """Learn the time that it took to draft so many tokens."""
        if tokens:
            each = seconds / tokens
            self._draft_seconds = each if not self._draft_seconds else 0.8 * self._draft_seconds + 0.2 * each

    def _cost(self, drafted: int) -> float:
        """Return the seconds of a call that verifies so many drafts, and of drafting them."""
        plain = self._seconds.get(0, 1.0)
        return self._seconds.get(drafted, plain * prior_cost(drafted)) + drafted * self._draft_seconds


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Return the mean number of tokens that a call with so many drafts adds."""
    if acceptance >= 1.0:
        return drafted + 1.0
    return (1.0 - acceptance ** (drafted + 1)) / (1.0 - acceptance)


def prior_cost(drafted: int) -> float:
    """Return the time of a call that verifies so many drafts over that of a call without, before it was measured."""
    return float(np.interp(drafted, list(_PRIOR_COSTS), list(_PRIOR_COSTS.values())))


class Stopwatch:
    """Measures a block in seconds."""

    seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begin


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens two texts share."""
    shortest = min(len(one), len(other))
    return next((i for i in range(shortest) if one[i] != other[i]), shortest)
