"""Modules that replace those of a host are instances of its class, and reject changes of attributes that were used for packing.

Loops of users search for `nn.Conv2d` or `nn.Linear`, and set attributes on the modules that they find.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from hf_cpu_accel.guard.code import forward_names
from hf_cpu_accel.guard.modules import is_package_class
from hf_cpu_accel.guard.plain_values import is_plain_value
from hf_cpu_accel.patching.accelerated_module import AcceleratedModule
from hf_cpu_accel.patching.restore import SIZES, Journal, SwappedModule

# Methods that a class may override: replacements have their own, or call the host's.
_OVERRIDDEN = frozenset(
    ("__init__", "__repr__", "__setstate__", "__doc__", "__module__", "__annotations__", "__dict__")
) | {"__weakref__", "__firstlineno__", "__static_attributes__", "forward", "extra_repr"}
_classes: dict[tuple[type[Replacement], type[nn.Module]], type[Replacement]] = {}


class Replacement(AcceleratedModule):
    """Base class of modules that replace a host's module. `replace_classes` makes them instances of its class.

    Attributes:
        host_class: the class of the host, on the created class; else None.
        prefix: prefix of the name of the created class, before the host's.
    """

    host_class: type[nn.Module] | None = None
    prefix: str = "Fused"
    _fixed: frozenset[str] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as `nn.Module` does, but reject changes of values that the host's forward reads or that were used for
        packing.

        Raises:
            RuntimeError: the value would change.
        """
        if name in self._fixed:
            refuse_other(vars(self), name, value)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        cls = type(self)
        ours = cls if self.host_class is None else cls.__bases__[0]
        return _empty, (ours, self.host_class), self.__getstate__()


def replace_classes(journal: Journal) -> None:
    """Make the replacements in a model instances of the classes that they replace. Call it last: rules detect packed modules by
    class."""
    for change in journal.changes:
        if isinstance(change, SwappedModule):
            for module, original in _pairs(change.parent._modules[change.name], change.original):
                if isinstance(module, Replacement) and module.host_class is None:
                    _present_as(module, original)


def _pairs(module: nn.Module | None, original: nn.Module | None) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield (module, replaced module) for a replacement, and for the replacements inside of it."""
    if module is None or original is None or module is original:
        return
    yield module, original
    for name, child in module._modules.items():
        yield from _pairs(child, original._modules.get(name))


def refuse_other(state: dict[str, Any], name: str, value: Any) -> None:
    """Reject another value of an attribute.

    Args:
        state: the attributes of a module.

    Raises:
        RuntimeError: `name` is one of them already, and is not equal to `value`.
    """
    if name in state and state[name] != value:
        raise RuntimeError(
            f"{name}={value!r} cannot be set on an accelerated model: its weights were packed with {state[name]!r}. Call "
            "hf_cpu_accel.restore, set it, and accelerate again"
        )


def _present_as(replacement: Replacement, original: nn.Module) -> None:
    """Make `replacement` an instance of the class of `original`, with the plain attributes that its forward reads."""
    host = next(_hosts(replacement, original), None)
    if host is None:
        return
    cls: type = host
    state, plain, read = vars(replacement), dict(_plain_attributes(original)), forward_names(cls)
    state.update({name: plain[name] for name in plain.keys() & read - state.keys()})
    state["_fixed"] = frozenset(plain.keys() & (read | state.keys()) - SIZES)
    replacement.__class__ = _class_of(type(replacement), host)


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name != "training" and not name.startswith("_") and is_plain_value(value):
            yield name, value


def _hosts(replacement: nn.Module, original: nn.Module) -> Iterator[type[nn.Module]]:
    """Yield the classes of `original` that `replacement` can be an instance of, the nearest first.

    They do not change how a module is stored, moved or asked for attributes, and their forward reads nothing that the
    replacement lacks (as does the forward of a linear with quantized tensors).
    """
    if is_package_class(type(original)):
        return
    others = (name for name, value in vars(original).items() if not is_plain_value(value))
    held = {*original._parameters, *original._buffers, *original._modules, *others}
    missing = {name for name in held if not hasattr(replacement, name)}
    for cls in parametrize.type_before_parametrizations(original).__mro__:
        if cls is nn.Module or not issubclass(cls, nn.Module):
            return
        added = [base for base in cls.__mro__[: cls.__mro__.index(nn.Module)] if base is not object]
        kind: type = cls
        if not any(_interferes(base, replacement) for base in added) and not missing & forward_names(kind):
            yield cls


def _interferes(base: type, replacement: nn.Module) -> bool:
    members = vars(base)
    overridden = members.keys() & vars(nn.Module).keys() - _OVERRIDDEN
    computed = (members.get(name) for name in vars(replacement))
    return bool(overridden) or any(hasattr(member, "__set__") for member in computed)


def _class_of(ours: type[Replacement], host: type[nn.Module]) -> type[Replacement]:
    """Return the class with the bases `ours` and `host`, always the same for the same two."""
    known = _classes.get((ours, host))
    return known or _classes.setdefault((ours, host), _mixed(ours, host))


def _mixed(ours: type[Replacement], host: type[nn.Module]) -> type[Replacement]:
    members = {"__module__": ours.__module__, "__doc__": ours.__doc__, "host_class": host}
    mixed: Any = type(f"{ours.prefix}{host.__name__}", (ours, host), members)
    # transformers wraps the forward of every new layer class, which costs each call.
    mixed.forward = ours.forward
    return mixed


def _empty(ours: type[Replacement], host: type[nn.Module] | None) -> nn.Module:
    """Return an instance without attributes, for copies and pickles."""
    cls = ours if host is None else _class_of(ours, host)
    return cls.__new__(cls)
