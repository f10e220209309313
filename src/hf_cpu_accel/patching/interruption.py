"""Signals wait while a model is put back: a handler that raises (Ctrl-C, a server's SIGTERM) would leave it between two states."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]


class Uninterrupted:
    """`with Uninterrupted():` has the handlers of signals called at the end of the block, each once at most.

    Python runs them in the main thread alone, so in others nothing has to wait. What an ordinary failure leaves is the block's own
    matter.
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
            True  # only now, at once for all: who is left in place after a failure above passes calls on
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
    """In the place of a signal's handler."""

    def __init__(self, block: Uninterrupted, number: int, handler: _Handler) -> None:
        self.block, self.number, self.handler = block, number, handler
        self.has_arrived = False

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if self.block.waits:
            self.has_arrived = True
            return None
        return self.handler(number, frame)
