"""Why a service refuses a request: its queue is full, it is about to stop, or the request will never do."""

from __future__ import annotations


class Busy(RuntimeError):
    """More is waiting than the service takes; the same request may succeed later."""


class Stopping(RuntimeError):
    """The service finishes what it has, and takes nothing new."""


class BadInput(ValueError):
    """What is asked is nothing that the model can do."""


class TooLong(ValueError):
    """An input, or a request, of more than the model or the service takes."""
