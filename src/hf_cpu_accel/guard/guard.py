"""Detect changes of what a captured layer depends on besides its arguments and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, getitem, is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.guard.code import Mentions, forward_names, is_of_library
from hf_cpu_accel.guard.modules import (
    GLOBAL_HOOKS,
    asks_for_mode,
    class_of,
    instance_forward,
    is_package_class,
    names_of_package,
)
from hf_cpu_accel.guard.plain_values import is_plain_value, value_reader
from hf_cpu_accel.guard.stores import stores_of
from hf_cpu_accel.runtime.tracing import constant_while_traced

_CONTAINERS = (list, dict, set)
_FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType)
_OTHERS = (nn.Module, Tensor, ModuleType, Mapping, list, tuple, set)  # never compared by identity
_DEEPEST = 2  # a config in a config
_OF_PACKED = ("training", "weight_dtype")  # attributes of packed modules that recorded steps depend on
# Attributes of guards that each copy computes again.
_PER_COPY = (
    *("_read", "_values", "_holders", "_names", "_objects", "_hosts", "_types"),
    *("_states", "_sizes", "_with_forward", "_classes", "_forwards"),
)
_forward_of = attrgetter("forward")


class Guard:
    """What a captured layer depends on besides its arguments and weights, to detect changes since it was captured.

    It compares:

    - child modules, forwards of modules and of their classes, and whether there are hooks of all modules
    - attributes with plain values or functions, of modules and of configs and other objects in them
    - parameters and buffers that were None
    - new attributes, if the code of the layer mentions their names
    - for recorded layers also classes of modules, attributes of classes, new parameters, and globals

    It does not see tensors that are no parameters, containers that were empty or are large, objects in containers, other methods
    of classes, values that code reads through closures, C extensions or files, and globals of fused layers. Attributes that were
    None or missing do not count if calls of the modules store them.

    Args:
        root: the layer, unchanged since it was captured.
        followed: attributes of the root that do not count, since each call of the captured layer reads them.
        structure: whether to compare child modules and forwards.
        attributes: whether to compare attributes.
        recorded: whether to compare what only recorded layers depend on.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        followed: Sequence[str] = (),
        structure: bool = True,
        attributes: bool = True,
        recorded: bool = False,
    ) -> None:
        modules = list(root.modules())
        hosts = [module for module in modules if _is_of_host(module)]
        self._children = [module._modules for module in modules if module._modules and structure]
        self._first_children = [dict(children) for children in self._children]
        self._inner = [m for m in modules[1:] if structure and instance_forward(m) is None]
        self._patchable = hosts if structure else []
        self._is_patched = False
        self._attributes = _Attributes()
        if attributes:
            mentions = _mentions(hosts) if recorded else None
            self._attributes.add(hosts, mentions, root, followed)
            if mentions is not None:
                self._attributes.add_recorded(hosts, mentions, modules)
        self._find()

    @constant_while_traced
    def has_changed(self) -> bool:
        """Return whether something changed; for a graph that is traced, at that time."""
        try:
            if (
                GLOBAL_HOOKS[0]
                or GLOBAL_HOOKS[1]
                or self._children != self._first_children
                or [*map(_forward_of, self._classes)] != self._forwards
                or [read(state) for read, state in self._read] != self._values
                or (
                    self._objects
                    and not all(map(is_, map(getitem, self._holders, self._names), self._objects))
                )
                or (self._hosts and [*map(type, self._hosts)] != self._types)
            ):
                return True
        except Exception:  # an attribute was removed, or its type compares differently
            return True
        if [*map(len, self._states)] != self._sizes and self._has_new():
            return True
        # Removed hooks of diffusers leave the class's forward there.
        return any(map(_has_forward, self._with_forward)) if self._with_forward else False

    def _has_new(self) -> bool:
        """Return whether there is a new attribute that code may read: a function that replaces a method, or a number that
        replaces one of the class."""
        self._with_forward[:] = (module for module in self._inner if "forward" in vars(module))
        attributes = self._attributes
        for owner, known in attributes.known:
            if not attributes.names.isdisjoint(_state_of(owner).keys() - known):
                return True
        self._sizes[:] = map(len, self._states)
        return False

    def _find(self) -> None:
        """Find the dictionaries and classes that a call compares."""
        attributes = self._attributes
        self._read = [(read, _state_of(owner)) for owner, read in attributes.readers]
        self._values = attributes.values
        self._holders = [_state_of(owner) for owner, _ in attributes.places]
        self._names = [name for _, name in attributes.places]
        self._objects, self._hosts, self._types = attributes.objects, attributes.hosts, attributes.types
        owners = {id(owner): owner for owner in (*(owner for owner, _ in attributes.known), *self._inner)}
        self._states = [*map(_state_of, owners.values())]
        self._sizes: list[int] = []  # not counted yet
        self._with_forward: list[nn.Module] = []
        self._classes = _classes_of(self._patchable)
        self._forwards = [] if self._is_patched else [*map(_forward_of, self._classes)]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the dictionaries, which copies have of their own, and without classes, which may be local."""
        is_patched = [*map(_forward_of, self._classes)] != self._forwards
        state = {name: value for name, value in vars(self).items() if name not in _PER_COPY}
        return {**state, "_is_patched": is_patched}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._find()


class _Attributes:
    """Attributes of modules and of objects in them. An owner of attributes is a dictionary, or an object that has one.

    Attributes:
        readers, values: owners with functions that read plain values, and these values.
        places, objects: owners with the names of other values, and these values, to compare them by identity.
        known: owners, and the names that do not count if they are new.
        names: the names that code mentions.
        hosts, types: modules, and their classes.
    """

    def __init__(self) -> None:
        self.readers: list[tuple[Any, Callable[[Any], Any]]] = []
        self.values: list[Any] = []
        self.places: list[tuple[Any, str]] = []
        self.objects: list[Any] = []
        self.known: list[tuple[Any, frozenset[str]]] = []
        self.names: set[str] = set()
        self.hosts: list[nn.Module] = []
        self.types: list[type] = []
        self._stored: frozenset[str] = frozenset()
        self._seen: set[int] = set()

    def add(
        self, hosts: list[nn.Module], mentions: Mentions | None, root: nn.Module, followed: Sequence[str]
    ) -> None:
        """Add the attributes of modules, except for those of `root` that are followed."""
        classes = _classes_of(hosts)
        self.names = set(forward_names(*classes)) if mentions is None else mentions.names
        self._stored = frozenset[str]().union(*map(stores_of, classes))
        for module in hosts:
            self._add_module(module, followed if module is root else ())

    def add_recorded(self, hosts: list[nn.Module], mentions: Mentions, modules: list[nn.Module]) -> None:
        """Add what only recorded layers depend on: packed modules, whose own checks steps do not run, classes and globals."""
        self.hosts, self.types = hosts, [*map(type, hosts)]
        for module in modules:
            state = {} if _is_of_host(module) else vars(module)
            self._add(module, {name: state[name] for name in _OF_PACKED if name in state}, 0)
        for module in hosts:
            self.known += ((tensors, frozenset(tensors)) for tensors in (module._parameters, module._buffers))
        for namespace, names in mentions.globals.values():
            self._add(namespace, {name: namespace[name] for name in names & namespace.keys()}, 1)
        owners = [owner for owner, _ in self.known if not isinstance(owner, dict)]
        for cls in {base for owner in owners for base in class_of(owner).__mro__ if not is_of_library(base)}:
            members = ((name, vars(cls)[name]) for name in self.names & vars(cls).keys())
            plain = {n: v for n, v in members if is_plain_value(v) and not isinstance(v, _FUNCTIONS)}
            self._add(cls, {n: v for n, v in plain.items() if not n.startswith("__")}, 0)

    def _add_module(self, module: nn.Module, followed: Sequence[str]) -> None:
        """Add the attributes of a module, without those in which forwards store results."""
        state, own = vars(module), names_of_package(module)
        skipped = own.union(followed) if followed else own
        values = {name: value for name, value in state.items() if name not in skipped}
        for name in [name for name, value in values.items() if self._is_store(name, value)]:
            del values[name]
        if asks_for_mode(module):
            values["training"] = module.training
        self._add(module, values, _DEEPEST)
        self.known.append((module, own.union(state, self._stored)))
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    self.places.append((tensors, name))
                    self.objects.append(None)

    def _is_store(self, name: str, value: Any) -> bool:
        """Return whether forwards may store results there."""
        return (value is None and name in self._stored) or (isinstance(value, _CONTAINERS) and not value)

    def _add(self, owner: Any, values: dict[str, Any], depth: int) -> None:
        """Add some of the values of an owner, and the attributes of objects among them: configs."""
        plain = []
        for name, value in values.items():
            if is_plain_value(value):
                plain.append(name)
            elif name in self.names and not isinstance(value, _OTHERS) and not is_package_class(type(value)):
                self.places.append((owner, name))
                self.objects.append(value)
                if depth and _has_attributes(value):
                    self._add_object(value, depth - 1)
        if plain:
            read, present = value_reader(_state_of(owner), plain)
            self.readers.append((owner, read))
            self.values.append(present)

    def _add_object(self, value: Any, depth: int) -> None:
        """Add the attributes of an object that code mentions."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        state, renamed = vars(value), getattr(type(value), "attribute_map", None)
        if isinstance(renamed, dict):  # in configs of transformers
            self.names |= {renamed[name] for name in self.names & renamed.keys()}
        self._add(value, {name: state[name] for name in self.names & state.keys()}, depth)
        self.known.append((value, frozenset(state)))


def _has_forward(module: nn.Module) -> bool:
    return instance_forward(module) is not None


def _is_of_host(module: nn.Module) -> bool:
    """Return whether a module has a forward of Python, and a class that this package does not define, or only adds a forward to."""
    return not isinstance(module, torch.jit.ScriptModule) and not is_package_class(type(module))


def _classes_of(hosts: Iterable[nn.Module]) -> list[type]:
    return list(dict.fromkeys(map(class_of, hosts)))


def _has_attributes(value: Any) -> bool:
    return type(getattr(value, "__dict__", None)) is dict and not isinstance(value, (*_OTHERS, *_FUNCTIONS))


def _state_of(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _mentions(hosts: list[nn.Module]) -> Mentions:
    """Return the names that the forwards of modules mention, with the functions and objects that their attributes hold."""
    mentions = Mentions()
    classes = _classes_of(hosts)
    for cls in classes:
        mentions.add_methods(cls, forward_names(*classes) | {"forward"})
    values = [value for module in hosts for value in vars(module).values()]
    for value in values:
        if isinstance(value, _FUNCTIONS):
            mentions.add(value)
    for cls in {type(value) for value in values if _has_attributes(value)}:
        mentions.add_methods(cls, {*mentions.names, "__call__"})
    return mentions
