"""Plain values: values that `==` compares completely, so that a changed attribute can be detected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

# Immutable values, for which equal is identical. And types and functions, which are equal only to themselves.
VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice),
    *(torch.dtype, torch.device),
    *(type, FunctionType, BuiltinFunctionType),
)
_SEQUENCES = (list, tuple, set, frozenset, torch.Size)
_MOST_VALUES = 256  # of a container: it is compared in each call


def is_plain_value(value: Any) -> bool:
    """Return whether `value` is a plain value, or a small container of plain values."""
    if isinstance(value, VALUES):
        return True
    if type(value) is dict:
        return len(value) <= _MOST_VALUES and all(map(is_plain_value, (*value, *value.values())))
    return type(value) in _SEQUENCES and len(value) <= _MOST_VALUES and all(map(is_plain_value, value))


def value_reader(state: dict[str, Any], names: Iterable[str]) -> tuple[Callable[[Any], Any], Any]:
    """Return a function that reads the plain values under these names (at least one), and its result for `state` now.

    The result is compared by `==` with later ones. The function raises KeyError if a name is gone.
    """
    read = itemgetter(*names)
    return read, _copied(read(state))


def is_same_value(one: object, other: object) -> bool:
    """Return whether one value can replace the other: a container only itself, since it may be written to."""
    return one is other or (type(one) is type(other) and isinstance(one, VALUES) and bool(one == other))


def _copied(value: Any) -> Any:
    """Return a copy of a container, which may be written to, or the value itself."""
    if type(value) is dict:
        return {name: _copied(part) for name, part in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value
