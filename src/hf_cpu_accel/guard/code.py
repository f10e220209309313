"""The names that code mentions, from its code objects: names of globals and attributes, and strings that may go to `getattr`.

Nothing is disassembled or run, so reads and writes look alike.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import suppress
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_DEEPEST = 4  # calls inside of calls
_LIBRARIES = ("torch", "hf_cpu_accel", "builtins")


class Mentions:
    """The names that functions mention, and the functions of the same package that they call.

    Attributes:
        names: of globals and attributes.
        globals: by id, the namespace of each Python module, and the names that its functions mention.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._seen: set[int] = set()

    def add(self, value: Any, depth: int = _DEEPEST) -> None:
        """Add a function or method, those in its closure and those that it calls. Other values are ignored."""
        for function in _functions(value):
            if id(function) in self._seen:
                continue
            self._seen.add(id(function))
            names = _names(function.__code__)
            self.names |= names
            if not is_of_library(function):
                namespace = function.__globals__
                self.globals.setdefault(id(namespace), (namespace, set()))[1].update(names)
                if depth:
                    for called in _called(function, names):
                        self.add(called, depth - 1)

    def add_methods(self, cls: type, names: Container[str]) -> None:
        """Add the methods of `cls` with these names."""
        for name, member in _members(cls):
            if name in names:
                self.add(member)


@cache
def forward_names(*classes: type) -> frozenset[str]:
    """Return the names that the forwards of classes, and the methods of any of them that these call, mention."""
    return frozenset().union(*_reached(*classes).values())


def unread_stores(cls: type, stored: frozenset[str]) -> frozenset[str]:
    """Return the attributes among `stored` that the forward of `cls` leaves for other code to read.

    Those that `__init__` creates, or that a method mentions which the forward calls, are the state of the module.
    """
    if not stored:
        return stored
    forward, init = (_by_method(cls).get(name, frozenset()) for name in ("forward", "__init__"))
    others = (names for method, names in _reached(cls).items() if method != "forward")
    return (stored & forward).difference(init, *others)


def is_of_library(value: Any) -> bool:
    """Return whether torch, this package or Python defines a class or function."""
    return _package(value) in _LIBRARIES


def _reached(*classes: type) -> dict[str, frozenset[str]]:
    """Return the names that the forwards of classes, and the methods that these call, mention, by method."""
    by_method, reached, waiting = _by_method(*classes), dict[str, frozenset[str]](), ["forward"]
    while waiting:
        method = waiting.pop()
        if method in by_method and method not in reached:
            reached[method] = by_method[method]
            waiting += by_method[method]
    return reached


def _by_method(*classes: type) -> dict[str, frozenset[str]]:
    by_method: dict[str, frozenset[str]] = {}
    for name, member in (pair for cls in classes for pair in _members(cls)):
        names = (_names(function.__code__) for function in _functions(member))
        by_method[name] = by_method.get(name, frozenset()).union(*names)
    return by_method


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield what `cls` and its bases define by name, up to `nn.Module`, the functions of a property each alone."""
    for base in cls.__mro__:
        if base in (nn.Module, object):
            return
        for name, member in vars(base).items():
            parts = (member.fget, member.fset) if isinstance(member, property) else (member,)
            yield from ((name, part) for part in parts)


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield a function, or that of a method, and the functions below its decorators."""
    value = getattr(value, "__func__", value)
    while value is not None:
        if isinstance(value, FunctionType):
            yield value
        state = getattr(value, "__dict__", None)
        value = state.get("__wrapped__") if type(state) is dict else None


def _called(function: FunctionType, names: frozenset[str]) -> Iterator[Any]:
    """Yield the values in the closure of a function, and the functions of its package that it mentions."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty still
            yield cell.cell_contents
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if callable(value) and _package(value) == _package(function):
            yield value


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _names(code: CodeType) -> frozenset[str]:
    words = (part for part in code.co_consts if isinstance(part, str) and part.isidentifier())
    inner = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset((*code.co_names, *words)).union(*inner)
