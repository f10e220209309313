"""Detect changes inside of a fused module since it was created."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import repeat
from operator import contains
from typing import Any

import torch
from torch import nn

from hf_cpu_accel.patching.class_code import names_in, names_written
from hf_cpu_accel.patching.hooks import has_global_hooks, instance_forward
from hf_cpu_accel.patching.modes import asks_for_mode
from hf_cpu_accel.patching.plain_values import is_plain_value, value_reader
from hf_cpu_accel.runtime.tracing import constant_while_traced

# Attributes of every module, which are checked separately or do not count, and a forward that was set before the fusion.
_NOT_TOLD = frozenset((*vars(nn.Module()), "forward"))
_CONTAINERS = (list, dict, set)
_PACKAGE = "hf_cpu_accel."
_FOUND = ("_states", "_told_by", "_known_by", "_attributes")  # of the modules, found again for each copy


class Inside:
    """The modules inside of a fused module, and the plain attributes that identify their state.

    A fused forward reads none of these. An adapter or another norm in place of a module, a forward set on one, or another scale
    of attention would make it differ from the class's own forward.

    Args:
        root: the module, unchanged since it was fused.
        by_attributes: whether attributes count.
        followed: attributes of the root that do not count, since the fused forward reads them in each call.
    """

    def __init__(self, root: nn.Module, *, by_attributes: bool = True, followed: Sequence[str] = ()) -> None:
        modules = list(root.modules())
        self._modules = [module for module in modules[1:] if instance_forward(module) is None]
        self._children = [module._modules for module in modules if module._modules]
        self._fused_children = [dict(children) for children in self._children]
        plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        told = [module for module in plain if by_attributes and not is_package_class(type(module))]
        written = frozenset[str]().union(*(names_written(class_of(module)) for module in told))
        named = [
            (module, names)
            for module in told
            if (names := tuple(_names(module, written, followed if module is root else ())))
        ]
        self._told = [module for module, _ in named]
        self._known = [(module, frozenset(vars(module)) | written) for module in told]
        values = [value_reader(vars(module), names) for module, names in named]
        self._readers, self._values = [read for read, _ in values], [value for _, value in values]
        self._find_states()

    @constant_while_traced
    def has_changed(self) -> bool:
        """Return whether something changed; for a graph that is traced, at that time."""
        if self._children != self._fused_children:
            return True
        if has_global_hooks() or (sum(map(len, self._known_by)) != self._attributes and self._has_new()):
            return True
        # Removed hooks of diffusers leave the class's forward there.
        is_set = any(map(contains, self._states, repeat("forward")))
        if is_set and any(instance_forward(module) is not None for module in self._modules):
            return True
        try:
            return [read(state) for read, state in self._told_by] != self._values
        except KeyError:
            return True

    def _find_states(self) -> None:
        self._states = [vars(module) for module in self._modules]
        self._told_by = list(zip(self._readers, map(vars, self._told), strict=True))
        self._known_by = [vars(module) for module, _ in self._known]
        self._attributes = -1  # their number, not counted yet

    def _has_new(self) -> bool:
        """Return whether a module has a new attribute that its class's forward may read: a function that replaces a method, or a
        number that replaces one of the class."""
        for module, known in self._known:
            new = vars(module).keys() - known - _NOT_TOLD - _own_names(_type(module))
            if new & names_in(class_of(module)):
                return True
        self._attributes = sum(map(len, self._known_by))
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _FOUND}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose modules have their own dictionaries."""
        vars(self).update(state)
        self._find_states()


def _names(module: nn.Module, written: frozenset[str], followed: Sequence[str]) -> Iterator[str]:
    """Yield the names of plain attributes that the class's forward may read, including the mode.

    None does not count if the methods of the class write to that name (`written`), and empty containers never do: forwards store
    results there.
    """
    own = _own_names(_type(module))
    if asks_for_mode(module):
        yield "training"
    for name, value in vars(module).items():
        if name in _NOT_TOLD or name in own or name in followed or not is_plain_value(value):
            continue
        if (value is None and name in written) or (isinstance(value, _CONTAINERS) and not value):
            continue
        yield name


def is_package_class(cls: type) -> bool:
    """Return whether this package defines the class; its modules check their own attributes."""
    return cls.__module__.startswith(_PACKAGE)


def _type(module: nn.Module) -> type:
    return type(module)


def class_of(module: nn.Module) -> type:
    """Return the class of a module, of fused ones the original class."""
    original: type = getattr(type(module), "_original_class", type(module))
    return original


@cache
def _own_names(cls: type) -> frozenset[str]:
    """Return the attributes that a fused class adds to the original class and checks itself."""
    fused = getattr(cls, "_fused_class", None)
    if fused is None:
        return frozenset()
    bases = [base for base in fused.__mro__ if is_package_class(base)]
    return frozenset(name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ())))
