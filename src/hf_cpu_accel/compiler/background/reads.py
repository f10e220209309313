"""The attributes of modules that a forward reads. Their values are compiled in, so compiled code is valid only while they stay.

Blocks that differ in other attributes (the index of a layer) share one compiled form.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.guard.plain_values import CONSTANTS
from hf_cpu_accel.providers.route import Route
from hf_cpu_accel.rewrite.linear.projection_group import ProjectionGroup

_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
_DEEPEST = 12
_PLAIN = (*CONSTANTS, torch.Size)


@dataclass(frozen=True)
class Read:
    """An attribute that was read: `name` of the module at `path`, and the digest of its value."""

    path: str
    name: str
    digest: str


@contextmanager
def recorded(root: nn.Module) -> Iterator[dict[tuple[str, str], Any]]:
    """Record the plain attributes of the modules of `root` that are read inside, as {(path, name): value}.

    Args:
        root: a shadow copy, because its modules have other classes meanwhile.
    """
    reads: dict[tuple[str, str], Any] = {}
    originals = []
    try:
        for path, module in root.named_modules():
            cls = type(module)
            originals.append((module, cls))
            module.__class__ = _watching(cls, path, reads)
        yield reads
    finally:
        for module, cls in originals:
            module.__class__ = cls


def _watching(cls: type[nn.Module], path: str, reads: dict[tuple[str, str], Any]) -> type[nn.Module]:
    def read(self: nn.Module, name: str) -> Any:
        value = cls.__getattribute__(self, name)
        if name not in _MACHINERY and name in object.__getattribute__(self, "__dict__"):
            reads[path, name] = value
        return value

    return type(cls.__name__, (cls,), {"__getattribute__": read, "__module__": cls.__module__})


def digest(value: object) -> str:
    """Return a hash that is equal, in any process, for values that compiled code cannot tell apart.

    Tensors count by dtype and shape alone.
    """
    return hashlib.sha256(repr(_described(value, _DEEPEST)).encode()).hexdigest()[:24]


def is_settings(value: object) -> bool:
    """Return whether `value` is an object of constants only, such as a configuration."""
    if isinstance(value, (nn.Module, type, types.FunctionType, *_PLAIN)) or not hasattr(value, "__dict__"):
        return False
    return _is_constant(vars(value), 4)


def _is_constant(value: object, depth: int) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        return all(_is_constant(part, depth - 1) for part in value.values())
    if isinstance(value, tuple | list | set | frozenset):
        return all(_is_constant(part, depth - 1) for part in value)
    if isinstance(value, Tensor) or callable(value):
        return False
    return hasattr(value, "__dict__") and _is_constant(vars(value), depth - 1)


def _described(value: Any, depth: int) -> Any:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, _PLAIN):
        return kind, repr(value)
    # Routes and groups learn from calls which kernel is fastest; compiled code does not depend on that.
    if isinstance(value, Route):
        return "route", value.work.key
    if isinstance(value, ProjectionGroup):
        return "group", _described((value.packed, value.ranges, value.biases), depth - 1)
    if depth == 0:
        return kind, id(value)  # too deep: equal to nothing else
    if isinstance(value, Tensor):
        return "tensor", str(value.dtype), tuple(value.shape)
    if isinstance(value, types.FunctionType):
        code, cells = value.__code__, [cell.cell_contents for cell in value.__closure__ or ()]
        bound = _described((value.__defaults__, value.__kwdefaults__, cells), depth - 1)
        return "function", value.__module__, value.__qualname__, _code(code), bound
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return "named", value.__module__, value.__qualname__
    if isinstance(value, types.MethodType):
        return "method", _described(value.__func__, depth - 1), type(value.__self__).__qualname__
    if isinstance(value, functools.partial):
        return "partial", *(_described(part, depth - 1) for part in (value.func, value.args, value.keywords))
    if isinstance(value, Mapping):
        pairs = [(_described(name, depth - 1), _described(part, depth - 1)) for name, part in value.items()]
        return kind, sorted(pairs, key=repr)
    if isinstance(value, set | frozenset):
        return kind, sorted((_described(part, depth - 1) for part in value), key=repr)
    if isinstance(value, tuple | list):
        return kind, [_described(part, depth - 1) for part in value]
    if isinstance(value, nn.Module):
        return "module", structure(value)
    state = value.__getstate__() if hasattr(value, "__getstate__") else getattr(value, "__dict__", None)
    return (kind, _described(state, depth - 1)) if isinstance(state, Mapping) else (kind, repr(value))


def _code(code: types.CodeType) -> Any:
    constants = [_code(part) if isinstance(part, types.CodeType) else repr(part) for part in code.co_consts]
    return code.co_code.hex(), code.co_names, constants


def structure(root: nn.Module) -> str:
    """Return a hash of the classes, parameters and buffers of `root`; blocks with equal hashes may share a compiled form."""
    lines = []
    for path, module in root.named_modules():
        tensors = {**module._parameters, **module._buffers}
        shapes = [(name, t is None or (str(t.dtype), tuple(t.shape))) for name, t in tensors.items()]
        lines.append((path, type(module).__module__, type(module).__qualname__, shapes))
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:24]
