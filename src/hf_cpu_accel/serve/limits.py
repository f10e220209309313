"""The exceptions for rejected requests: the queue is full, the service is stopping, or the request is invalid."""

from __future__ import annotations


class Busy(RuntimeError):
    """The queue is full; the same request may succeed later."""


class Stopping(RuntimeError):
    """The service is stopping: it finishes running requests and rejects new ones."""


class BadInput(ValueError):
    """The model does not support the request."""


class TooLong(ValueError):
    """An input or a request is longer than the limit of the model or the service."""
