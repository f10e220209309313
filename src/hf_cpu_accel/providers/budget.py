"""The time budget of measurements in a process."""

from __future__ import annotations

import time
from collections.abc import Callable

# Measuring may delay the first output of a model by this much, and slow down later calls by this share.
AT_ONCE_SECONDS = 0.15
SHARE_OF_TIME = 0.02


class Budget:
    """`AT_ONCE_SECONDS` plus `SHARE_OF_TIME` of the time since the first call of `left`.

    A measurement may overdraw it. Then no measurement starts until it is positive again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._spent = 0.0

    def left(self) -> float:
        """Return the remaining seconds; negative if overdrawn."""
        if self._since is None:
            self._since = self._clock()
        return AT_ONCE_SECONDS + SHARE_OF_TIME * (self._clock() - self._since) - self._spent

    def spend(self, seconds: float) -> None:
        self._spent += seconds
