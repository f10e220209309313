"""Find the attributes of modules that the code of their classes reads and writes."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

from torch import nn


@cache
def names_in(cls: type) -> frozenset[str]:
    """Return all names that the methods of `cls`, a module class, may read: names in their code, and strings that may go to
    `getattr`."""
    return frozenset(name for _, code in _codes(cls) for name in (*code.co_names, *_words(code)))


@cache
def names_written(cls: type) -> frozenset[str]:
    """Return the attributes, of any object, that the methods of `cls` write or delete after a module is created."""
    codes = [code for method, code in _codes(cls) if method != "__init__"]
    return frozenset(name for code in codes for name in _attributes(code, "STORE", "DELETE"))


@cache
def names_stored(cls: type) -> frozenset[str]:
    """Return the attributes that the forward of `cls` writes to its module but does not read, nor the methods it calls: other
    code reads them."""
    own = [code for method, code in _codes(cls) if method == "forward"]
    return frozenset(name for code in own for name in _own_written(code)) - names_read(cls)


@cache
def names_read(cls: type) -> frozenset[str]:
    """Return the names of all attributes that the forward of `cls` and the methods that it calls read, of any object."""
    codes: dict[str, list[CodeType]] = {}
    for method, code in _codes(cls):
        codes.setdefault(method, []).append(code)
    called, found = set[str](), {"forward"}
    while found:
        called |= found
        found = {
            name for method in found for code in codes.get(method, ()) for name in code.co_names
        } - called
        found &= codes.keys()
    reached = [code for method in called for code in codes.get(method, ())]
    return frozenset(name for code in reached for name in (*_attributes(code, "LOAD"), *_words(code)))


def _words(code: CodeType) -> Iterator[str]:
    """Yield the constants that may be passed to `getattr`."""
    return (word for word in code.co_consts if isinstance(word, str) and word.isidentifier())


def _attributes(code: CodeType, *kinds: str) -> Iterator[str]:
    """Yield the attributes of any object that the code stores, loads or deletes."""
    names = {f"{kind}_{what}" for kind in kinds for what in ("ATTR", "METHOD")}
    return (step.argval for step in dis.get_instructions(code) if step.opname in names)


def _own_written(code: CodeType) -> Iterator[str]:
    """Yield the attributes of its first argument that a function stores."""
    steps = list(dis.get_instructions(code))
    for before, step in pairwise(steps):
        if step.opname == "STORE_ATTR" and before.opname.startswith("LOAD_FAST") and code.co_argcount:
            loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)  # two at once
            if loaded[-1] == code.co_varnames[0]:
                yield step.argval


def _codes(cls: type) -> Iterator[tuple[str, CodeType]]:
    """Yield (name of the method, code) of all that `cls` adds to `nn.Module`, including functions inside of methods."""
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, member in vars(base).items():
            for function in _functions(member):
                yield from ((name, code) for code in _with_inner(function.__code__))


def _functions(member: Any) -> Iterator[FunctionType]:
    """Yield the functions of a class member, below decorators that name the function that they wrap."""
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
