"""How long measuring may hold a process up."""

from __future__ import annotations

import time
from collections.abc import Callable

# The first result of a model may come this much later, and all that follows may be this much slower, until all is known.
AT_ONCE_SECONDS = 0.15
SHARE_OF_TIME = 0.02


class Budget:
    """`AT_ONCE_SECONDS` to begin with, and `SHARE_OF_TIME` of the time that has passed since the first question.

    It may be overdrawn by what was begun; then nothing is begun until time has paid for it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._spent = 0.0

    def left(self) -> float:
        """Seconds; negative if overdrawn."""
        if self._since is None:
            self._since = self._clock()
        return AT_ONCE_SECONDS + SHARE_OF_TIME * (self._clock() - self._since) - self._spent

    def spend(self, seconds: float) -> None:
        self._spent += seconds
