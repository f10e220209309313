"""Sizes that record their source, so that a program can repeat a forward's arithmetic with other sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Hashed(Exception):
    """A size was used as a key: a cache may keep it, with values computed from it.

    Args:
        size: the ref of the size.
    """

    def __init__(self, size: Any) -> None:
        super().__init__()
        self.size = size


class Notes(Protocol):
    """The recorder of ops on sizes."""

    def computed(self, function: Callable[..., int], args: tuple[Any, ...], value: int) -> int: ...

    def expect(self, function: Callable[..., Any], args: tuple[Any, ...], value: Any) -> None: ...

    def hashed(self, size: Any) -> None: ...


class Size(torch.SymInt):
    """An int that was read from a tensor, or computed from such ints.

    Arithmetic returns another one. A comparison, or a conversion (a range, a float), is recorded as an expectation. It is a
    `SymInt` because torch accepts these as sizes, and because Python reads an `int` or a subclass directly: `range(size)` and
    `0.5 * size` would not be recorded. `isinstance` still sees an int.
    """

    def __init__(self, value: int, notes: Notes) -> None:
        self.plain, self._notes = value, notes

    def __index__(self) -> int:
        self._notes.expect(operator.pos, (self,), self.plain)
        return self.plain

    __int__ = __trunc__ = __floor__ = __ceil__ = __index__

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int

    def __hash__(self) -> int:
        """Return the hash, after reporting that the size is a key: it may outlive the call in a cache of functions, with values
        computed from it."""
        self._notes.hashed(self)
        return hash(self.plain)

    def __bool__(self) -> bool:
        return self.__index__() != 0

    def __repr__(self) -> str:
        return repr(self.__index__())

    def __format__(self, spec: str) -> str:
        return format(self.__index__(), spec)

    def __pos__(self) -> Size:
        return self

    def __neg__(self) -> int:
        return self._notes.computed(operator.neg, (self,), -self.plain)

    def bit_length(self) -> int:
        return self.__index__().bit_length()


class StandIn:
    """Stand-in for an object that is no tensor.

    Attributes:
        real: a copy of that object.
    """

    real: Any


class Sizes(tuple[Any, ...]):
    """A `torch.Size` of sizes."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return Sizes(found) if isinstance(key, slice) else found

    def numel(self) -> int:
        product: int = 1
        for size in self:
            product = size * product
        return product


def plain(value: Any) -> Any:
    """Return `value` with ints in place of sizes, and objects in place of their stand-ins."""
    if isinstance(value, Size):
        return value.plain
    if issubclass(type(value), StandIn):  # whose `__class__`, read by `isinstance`, is that of the object
        return value.real
    if isinstance(value, slice):
        return slice(*map(plain, (value.start, value.stop, value.step)))
    if type(value) in (tuple, list, Sizes, torch.Size):
        return (list if type(value) is list else tuple)(map(plain, value))
    if type(value) is dict:
        return {key: plain(part) for key, part in value.items()}
    return value


def _unary(name: str, function: Callable[..., Any]) -> None:
    def pinned(self: Size, *more: Any) -> Any:
        return function(self.__index__(), *more)

    setattr(Size, f"__{name}__", pinned)


def _arithmetic(name: str, function: Callable[..., Any], *, noted: bool) -> None:
    def forward(self: Size, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented  # it handles sizes itself
        if noted and isinstance(other, int | Size):
            return self._notes.computed(function, (self, other), function(self.plain, plain(other)))
        return function(self.__index__(), other)

    def backward(self: Size, other: Any) -> Any:
        if noted and isinstance(other, int):
            return self._notes.computed(function, (other, self), function(other, self.plain))
        return function(other, self.__index__())

    setattr(Size, f"__{name}__", forward)
    setattr(Size, f"__r{name}__", backward)


def _comparison(name: str) -> None:
    function = getattr(operator, name)

    def compare(self: Size, other: Any) -> Any:
        if not isinstance(other, int | float | Size):
            return NotImplemented
        result = function(self.plain, plain(other))
        self._notes.expect(function, (self, other), result)
        return result

    setattr(Size, f"__{name}__", compare)


_unary("abs", abs)
_unary("float", float)
_unary("complex", complex)
_unary("round", round)
_unary("invert", operator.invert)
for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _arithmetic(_name, getattr(operator, _name), noted=True)
for _name in ("truediv", "lshift", "rshift", "xor"):
    _arithmetic(_name, getattr(operator, _name), noted=False)
_arithmetic("pow", pow, noted=False)
_arithmetic("divmod", divmod, noted=False)
_arithmetic("and", operator.and_, noted=False)
_arithmetic("or", operator.or_, noted=False)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _comparison(_name)
