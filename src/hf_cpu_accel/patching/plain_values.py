"""Plain values: those that say all about themselves by `==`, so that it can be told whether an attribute is what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

# Values that never change: one that is equal is the same. And what code goes by, of which nothing but itself is equal.
CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice),
    *(torch.dtype, torch.device),
)
VALUES = (*CONSTANTS, type, FunctionType, BuiltinFunctionType)
_SEQUENCES = (list, tuple, set, frozenset, torch.Size)
_MOST_VALUES = 256  # of a container: it is compared in each call


def is_plain_value(value: Any) -> bool:
    """Whether it is a value, or a container of such that is no large one."""
    if isinstance(value, VALUES):
        return True
    if type(value) is dict:
        return len(value) <= _MOST_VALUES and all(map(is_plain_value, (*value, *value.values())))
    return type(value) in _SEQUENCES and len(value) <= _MOST_VALUES and all(map(is_plain_value, value))


def value_reader(state: dict[str, Any], names: Iterable[str]) -> tuple[Callable[[Any], Any], Any]:
    """What reads the plain values under these names, of which there is one at least, and what it gives for `state` now.

    That is compared by `==` with what it gives later. It raises KeyError where one of the names is gone.
    """
    read = itemgetter(*names)
    return read, _copied(read(state))


def is_same_value(one: object, other: object) -> bool:
    """Whether one may stand for the other: containers only for themselves, as they may be written to."""
    return one is other or (type(one) is type(other) and isinstance(one, VALUES) and bool(one == other))


def _copied(value: Any) -> Any:
    """A copy of containers, which may be written to."""
    if type(value) is dict:
        return {name: _copied(part) for name, part in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value
