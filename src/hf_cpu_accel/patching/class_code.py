"""Which attributes of modules the code of their classes reads and writes."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn


@cache
def names_in(cls: type) -> frozenset[str]:
    """All that the methods of `cls`, a class of modules, may ask one for: the names in their code, and the words, which may be
    given to `getattr`."""
    codes = [code for _, code in _codes(cls)]
    names = {name for code in codes for name in code.co_names}
    words = {
        word for code in codes for word in code.co_consts if isinstance(word, str) and word.isidentifier()
    }
    return frozenset(names | words)


@cache
def names_written(cls: type) -> frozenset[str]:
    """The attributes, of whichever object, that the methods of `cls` write or delete once a module is made."""
    return frozenset(
        instruction.argval
        for name, code in _codes(cls)
        if name != "__init__"
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("STORE_ATTR", "DELETE_ATTR")
    )


def _codes(cls: type) -> Iterator[tuple[str, CodeType]]:
    """(name of the method, code) of all that `cls` adds to `nn.Module`, functions inside of methods among them."""
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, member in vars(base).items():
            for function in _functions(member):
                yield from ((name, code) for code in _with_inner(function.__code__))


def _functions(member: Any) -> Iterator[FunctionType]:
    """Those that a member of a class is made of, beneath decorators that say what they wrap."""
    is_property = isinstance(member, property)
    parts = (member.fget, member.fset) if is_property else (getattr(member, "__func__", member),)
    for part in parts:
        function = inspect.unwrap(part) if callable(part) else None
        if isinstance(function, FunctionType):
            yield function


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
