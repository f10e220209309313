"""What a forward reads besides its arguments and weights: attributes of modules and configs, and which modules there are."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.rewrite.core.first_call import LEFT
from hf_cpu_accel.rewrite.recorded.held import is_ours

# Values that are compared as such.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device),
    *(type, FunctionType, BuiltinFunctionType),
)
_DEEPEST = 2  # a config in a config
_OWN = ("forward", "_programs", "_left", "_changes", LEFT)  # of recorded layers, which other threads may call
_CONTAINERS = (list, tuple, dict, set)


@contextmanager
def names_read() -> Iterator[set[str]]:
    """Gives the names in the code that this thread runs inside, among which are those of all attributes that it reads."""
    codes: set[CodeType] = set()
    names: set[str] = set()
    previous = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: codes.add(frame.f_code) if event == "call" else None)
    try:
        yield names
    finally:
        sys.setprofile(previous)
        for code in codes:
            names.update(
                code.co_names, (constant for constant in code.co_consts if isinstance(constant, str))
            )


class Guard:
    """Tells whether the attributes of a layer are what they were when this was made.

    Steps are taken with the numbers that they were recorded with. A forward, or a user, may change these between two calls
    (`layer.scale`, `config.layer_norm_eps`, a module that is exchanged, a forward that is put before its class's).

    Args:
        layer: a fused one. The attributes of our own modules in it are theirs to look after; of torch's, only what `eval` and
            `train` alone write is looked at.
        names: of the attributes that count.
    """

    def __init__(self, layer: nn.Module, names: set[str]) -> None:
        self._names = names
        self._states: list[
            tuple[dict[str, Any], Any, Any]
        ] = []  # of modules and configs, and what is read of them
        self._objects: list[tuple[dict[str, Any], str, Any]] = []
        modules = list(_not_ours(layer))
        self._children = [(m._modules, list(m._modules.values())) for m in modules if m._modules]
        self._all = [vars(child) for _, children in self._children for child in children if child is not None]
        seen: set[int] = set()
        for module in modules:
            if not type(module).__module__.startswith("torch."):
                self._take(vars(module), _DEEPEST, seen)

    def holds(self) -> bool:
        try:
            for state, read, values in self._states:
                if read(state) != values:
                    return False
            for state, name, value in self._objects:
                if state[name] is not value:
                    return False
        except KeyError:
            return False
        for children, given in self._children:
            if [*children.values()] != given:
                return False
        return not any([state["training"] or "forward" in state for state in self._all])  # noqa: C419 - half the time

    def _take(self, state: dict[str, Any], depth: int, seen: set[int]) -> None:
        """Note the values in `state`, and those of the objects in it that are no modules: configs."""
        if id(state) in seen:
            return
        seen.add(id(state))
        names = [name for name in self._names if name in state and _is_plain(state[name]) and name != LEFT]
        if names:
            read = itemgetter(*names)
            self._states.append((state, read, _copied(read(state))))
        for name, value in state.items():
            inner = getattr(value, "__dict__", None)
            if isinstance(inner, dict) and not isinstance(value, nn.Module | Tensor | type | FunctionType):
                self._names |= {other for own, other in _renamed(value) if own in self._names}
                self._objects.append((state, name, value))
                if depth:
                    self._take(inner, depth - 1, seen)


class Kept:
    """What the modules of a shadow hold, to tell whether a call of it changed that: their own attributes and containers.

    Args:
        modules: those that are not ours.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._held = [_held(module) for module in modules]

    def changed(self) -> str | None:
        """The name of an attribute that was."""
        for module, held in zip(self._modules, self._held, strict=True):
            now = _held(module)
            for name in {*held, *now}:
                if name not in held or name not in now or not _same(held[name], now[name]):
                    return name
        return None


def _not_ours(layer: nn.Module) -> Iterator[nn.Module]:
    """The layer, and the modules in it whose forward is recorded."""
    yield layer
    for child in layer.children():
        if not is_ours(child):
            yield from _not_ours(child)


def _renamed(config: Any) -> Iterable[tuple[str, str]]:
    """(name, that under which it is kept) in configs of transformers."""
    names = getattr(config, "attribute_map", None)
    return names.items() if isinstance(names, dict) else ()


def _is_plain(value: Any) -> bool:
    """Whether it says all by `==`: a value, or a container of such that is small."""
    if isinstance(value, _PLAIN):
        return True
    return type(value) in (list, tuple) and len(value) <= 16 and all(map(_is_plain, value))


def _copied(value: Any) -> Any:
    """A copy of lists, which may be written to."""
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value


def _held(module: nn.Module) -> dict[str, Any]:
    """(value, what is in it) of each attribute."""
    parts: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name not in _OWN:
            inside = (*value, *value.values()) if isinstance(value, dict) else value
            parts[name] = value, tuple(inside) if isinstance(value, _CONTAINERS) else ()
    return parts


def _same(one: Any, other: Any) -> bool:
    if one[0] is not other[0] and not (_is_plain(one[0]) and one[0] == other[0]):
        return False
    return len(one[1]) == len(other[1]) and all(map(_is_same, one[1], other[1]))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (_is_plain(one) and _is_plain(other) and bool(one == other))
