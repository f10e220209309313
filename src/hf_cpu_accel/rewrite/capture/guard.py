"""Track the values that a forward reads besides its arguments and weights: attributes of modules, configs and classes, and
globals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from hf_cpu_accel.patching.plain_values import is_plain_value, value_reader
from hf_cpu_accel.rewrite.capture.state_snapshot import OWN
from hf_cpu_accel.rewrite.capture.tensor_reader import is_package_module
from hf_cpu_accel.rewrite.core.packed_module import PackedModule

_FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType)
_DEEPEST = 2  # a config in a config


@dataclass
class Read:
    """The names in the code that ran.

    Attributes:
        names: includes the names of all attributes that it reads.
        globals: the global names of each Python module, and their values.
    """

    names: set[str] = field(default_factory=set)
    globals: list[tuple[dict[str, Any], set[str]]] = field(default_factory=list)


@contextmanager
def names_read() -> Iterator[Read]:
    """Yield the names in the code that this thread runs inside. No profiler may be active."""
    codes: dict[CodeType, dict[str, Any]] = {}
    read = Read()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            codes[frame.f_code] = frame.f_globals

    sys.setprofile(note)
    try:
        yield read
    finally:
        sys.setprofile(None)
        by_module: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for code, names in codes.items():
            read.names.update(
                code.co_names, (constant for constant in code.co_consts if isinstance(constant, str))
            )
            if not str(names.get("__name__")).startswith(("torch.", "hf_cpu_accel.")):
                by_module.setdefault(id(names), (names, set()))[1].update(code.co_names)
        read.globals += by_module.values()


class Guard:
    """Check that the values that the steps of a layer depend on are unchanged.

    Steps use the numbers that they were recorded with. A forward, or a user, may change these between two calls (`layer.scale`,
    `config.layer_norm_eps`, a parameter that was None). The layer itself checks for other modules, forwards and hooks
    (`FusedModuleMixin.is_watched`). Modules of this package check their own attributes.

    Args:
        layer: a fused one.
        read: the names in its code.
    """

    def __init__(self, layer: nn.Module, read: Read) -> None:
        self._read = read
        self._states: list[tuple[Any, Callable[[Any], Any], Any]] = []  # and the values read from them
        self._objects: list[tuple[Any, str, Any]] = []
        self._sizes: list[tuple[Any, frozenset[str]]] = []  # of states, and the names that must not be added
        self._seen: set[int] = set()
        modules = list(_not_ours(layer))
        self._types = [(module, type(module)) for module in modules]
        self._inside = [vars(module) for module in layer.modules() if module is not layer]
        for module in modules:
            self._take_module(module)
        for module in layer.modules():
            if isinstance(module, PackedModule):
                self._objects.append((vars(module), "weight_dtype", module.weight_dtype))
        for names, used in read.globals:
            self._take({n: names[n] for n in used if n in names}, names, depth=1)
        self._dicts = [state for state, _ in self._sizes]
        self._lengths = [*map(len, self._dicts)]

    def holds(self) -> bool:
        try:
            for state, read, values in self._states:
                if read(state) != values:
                    return False
            for state, name, value in self._objects:
                if state[name] is not value:
                    return False
        except Exception:  # it was removed, or its type compares differently
            return False
        for module, kind in self._types:
            if type(module) is not kind:
                return False
        if [*map(len, self._dicts)] != self._lengths and not self._is_nothing_new():
            return False
        return not any([state["training"] for state in self._inside])  # noqa: C419 - half the time

    def _is_nothing_new(self) -> bool:
        self._lengths = [*map(len, self._dicts)]
        return all(absent.isdisjoint(state) for state, absent in self._sizes)

    def _take_module(self, module: nn.Module) -> None:
        state = vars(module)
        read = {name: value for name, value in state.items() if name not in OWN}
        # Modules of torch read the names in their code, and get no new attributes.
        is_torchs = type(module).__module__.startswith("torch.")
        if is_torchs or is_package_module(module):
            read = {name: value for name, value in read.items() if name in self._read.names}
        self._take(read, state, _DEEPEST)
        tensors = module._parameters, module._buffers
        self._objects += ((held, name, None) for held in tensors for name, t in held.items() if t is None)
        if not is_torchs:
            for names in (state, *tensors):
                self._sizes.append((names, frozenset(self._read.names.difference(names))))
            self._take_class(type(module))

    def _take(self, read: dict[str, Any], state: Any, depth: int) -> None:
        """Record the values in `read`, a part of `state`, and those of objects in it that are no modules: configs."""
        plain = [name for name, value in read.items() if is_plain_value(value)]
        if plain:
            self._states.append((state, *value_reader(state, plain)))
        for name, value in read.items():
            if name in plain or isinstance(value, nn.Module | Tensor | ModuleType | Mapping):
                continue
            self._objects.append((state, name, value))
            inner = getattr(value, "__dict__", None)
            if depth and isinstance(inner, dict) and not isinstance(value, _FUNCTIONS):
                self._take_object(value, inner, depth - 1)

    def _take_object(self, value: Any, state: dict[str, Any], depth: int) -> None:
        if id(state) in self._seen:
            return
        self._seen.add(id(state))
        self._read.names |= {other for own, other in _renamed(value) if own in self._read.names}
        self._take({name: state[name] for name in self._read.names if name in state}, state, depth)
        self._sizes.append((state, frozenset(self._read.names.difference(state))))
        self._take_class(type(value))

    def _take_class(self, kind: type) -> None:
        """Record the plain values of a class; its methods are not tracked."""
        for cls in kind.__mro__:
            if id(cls) in self._seen or cls.__module__.startswith(("torch.", "hf_cpu_accel.", "builtins")):
                continue
            self._seen.add(id(cls))
            named = (name for name in self._read.names if name in vars(cls) and not name.startswith("__"))
            read = {name: value for name in named if not isinstance(value := vars(cls)[name], _FUNCTIONS)}
            self._take({n: v for n, v in read.items() if is_plain_value(v)}, vars(cls), 0)


def _not_ours(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the layer, and the modules in it whose forward is recorded."""
    yield layer
    for child in layer.children():
        if not is_package_module(child):
            yield from _not_ours(child)


def _renamed(config: Any) -> Iterable[tuple[str, str]]:
    """Yield (name, stored name) of renamed attributes in configs of transformers."""
    names = getattr(config, "attribute_map", None)
    return names.items() if isinstance(names, dict) else ()
