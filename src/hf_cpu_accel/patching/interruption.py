"""Delay signals while a model is restored: a handler that raises (Ctrl-C, a server's SIGTERM) would leave it between two states."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]


class Uninterrupted:
    """Call the handlers of signals at the end of a `with Uninterrupted():` block, each at most once.

    Python runs handlers in the main thread only, so other threads need no delay. The block itself handles ordinary exceptions.
    """

    def __init__(self) -> None:
        self.waits = False
        self._handlers: list[_Waiting] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                waiting = _Waiting(self, number, handler)
                self._handlers.append(waiting)
                signal.signal(number, waiting)
        self.waits = (
            True  # only now, for all at once: a handler that stays after a failure above passes calls on
        )

    def __exit__(self, *exception: object) -> None:
        self.waits = False
        for waiting in self._handlers:
            if signal.getsignal(waiting.number) is waiting:  # else the block has set another one
                signal.signal(waiting.number, waiting.handler)
        for waiting in self._handlers:
            if waiting.has_arrived:
                waiting.handler(waiting.number, None)


class _Waiting:
    """Replacement of a signal handler that records the signal."""

    def __init__(self, block: Uninterrupted, number: int, handler: _Handler) -> None:
        self.block, self.number, self.handler = block, number, handler
        self.has_arrived = False

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if self.block.waits:
            self.has_arrived = True
            return None
        return self.handler(number, frame)
