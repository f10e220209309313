"""A time after which whoever waits in vain fails, instead of waiting on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN = 10.0  # seconds: what waits for the same in a `finally` or at the end of a `with` fails as well


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread, in whatever lock or pipe it waits, after so many seconds and every 10 more."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
