"""A method of one model that overrides the method of its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Override:
    """Base of callables that are set on a model as plain attributes; they have the signature and documentation of the method.

    They refer to the model, so deep copies and pickles of the model have their own. A bound method would not work: it is pickled
    as the name of the method, which then finds the class's.
    """

    name: str

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.__doc__ = getattr(type(model), self.name).__doc__

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the method of the class, bound to the model."""
        method: Callable[..., Any] = getattr(type(self.model), self.name).__get__(self.model)
        return method

    @property
    def __self__(self) -> Any:
        return self.model

    @property
    def __name__(self) -> str:
        return self.name
