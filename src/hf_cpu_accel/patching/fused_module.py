"""Fused modules keep the class of the original module: isinstance checks, class attributes and other methods still work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from hf_cpu_accel.guard.code import unread_stores
from hf_cpu_accel.guard.guard import Guard
from hf_cpu_accel.guard.modules import class_of, is_package_class
from hf_cpu_accel.guard.stores import stores_of
from hf_cpu_accel.hosts.output_capturing import is_collecting_inside
from hf_cpu_accel.patching.accelerated_module import AcceleratedModule
from hf_cpu_accel.patching.hooks import (
    carried_attributes,
    forward_hooks,
    has_foreign_hook,
)


@dataclass(frozen=True)
class Reference:
    """The call of the own forward of a part that corresponds to its fused call.

    Attributes:
        args, kwargs: without anything that the call would write to.
        tokens: bool [B, L], the rows that count, or None for all.
        moves_rows: whether rounding may move a few rows (the choice between nearly equal experts).
        dtype: dtype in which the fused call keeps its values if that is narrower than the weights (a cache), else None.
        caches: the caches and mappings that the fused call writes to, each with the index of the layer's part.
        is_repeatable: whether it may run several times.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: Tensor | None = None
    moves_rows: bool = False
    dtype: str | None = None
    caches: tuple[tuple[Any, int | None], ...] = ()
    is_repeatable: bool = True


class CannotStandIn(Exception):
    """No fused forward can replace the forward of a module without a visible difference."""


# Names of every module that classes override.
_OF_MODULES = frozenset((*vars(nn.Module), *vars(nn.Module()), *vars(type("Empty", (nn.Module,), {}))))
_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


class FusedModuleMixin(AcceleratedModule):
    """Mixin of a fused forward; copies and pickles name the two classes instead of the mixed class."""

    reads_parameters: ClassVar[bool] = True
    _fused_class: type[nn.Module]
    _original_class: type[nn.Module]
    _hooks_inside: tuple[dict[int, Any], ...] = ()
    _guard: Guard | None = None  # from when the model is accelerated
    _guards_attributes: ClassVar[bool] = True
    _followed: tuple[str, ...] = ()  # attributes of the host that each fused call reads

    @property
    def is_edited(self) -> bool:
        """Return whether hooks of the user read or change values between the modules inside, or these modules changed: the
        original forward has to run."""
        if any(self._hooks_inside) and any(map(has_foreign_hook, self._hooks_inside)):
            return True
        return self._guard is not None and self._guard.has_changed()

    @property
    def is_watched(self) -> bool:
        """Return `is_edited`, or whether a caller asked transformers for values inside of the module."""
        return (any(self._hooks_inside) and is_collecting_inside()) or self.is_edited

    @property
    def is_watched_within(self) -> bool:
        """Return the same for a layer, whose outputs are the hidden states that callers ask for."""
        return (any(self._hooks_inside) and is_collecting_inside(but_hidden_states=True)) or self.is_edited

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        """Return the call of the own forward to compare with a fused call of these arguments, or None if the call is not fused
        or cannot run twice. Parts without this method are not compared."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return empty, (self._fused_class, self._original_class), self.__getstate__()


def watch_inner_modules(root: nn.Module) -> None:
    """Detect modules that are replaced inside of fused ones from now on. Call it after all fusions."""
    for module in root.modules():
        if isinstance(module, FusedModuleMixin):
            module._guard = Guard(module, followed=module._followed, attributes=module._guards_attributes)


def mixed_class(fused: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """Return the class with the bases `fused` and `original`, always the same for the same two."""
    known = _classes.get((fused, original))
    if known is not None:
        return known
    members = {
        "_fused_class": fused,
        "_original_class": original,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    mixed = type(f"Fused{original.__name__}", (fused, original), members)
    # transformers wraps the forward of every new layer class for gradient checkpointing, which costs each call and is for training.
    mixed.forward = fused.forward  # type: ignore[attr-defined]
    return _classes.setdefault((fused, original), mixed)


def conflicting_names(fused: type[nn.Module], layer: nn.Module, attributes: Iterable[str] = ()) -> list[str]:
    """Return the names of `layer` that mean something else in `fused` or are among `attributes`, in alphabetical order."""
    hidden = {name for base in _added(fused) for name in vars(base)}.union(attributes) - _OF_MODULES
    hosts = [base for base in _added(type(layer)) if not is_package_class(base)]
    present = {name for base in hosts for name in vars(base)}.union(
        layer._modules, layer._parameters, layer._buffers
    )
    if not isinstance(layer, FusedModuleMixin):
        present.update(vars(layer))
    return sorted(hidden & present)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _added(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    """Yield the classes that `cls` adds to `nn.Module`."""
    return (base for base in cls.__mro__ if issubclass(base, nn.Module) and base is not nn.Module)


def empty(fused: type[nn.Module], original: type[nn.Module]) -> nn.Module:
    """Return an instance without any attributes, even those of `nn.Module`."""
    cls = mixed_class(fused, original)
    return cls.__new__(cls)


def fused_layer(fused: type[nn.Module], layer: nn.Module, **attributes: Any) -> Any:
    """Return `layer` with the forward of `fused` and with `attributes`; the original is not changed.

    `_hooks_inside` holds the hooks of the modules in it, present and future ones.

    Raises:
        CannotStandIn: the own forward, which runs where the fused one cannot, would read changed attributes; or it stores values
            in attributes for other code, which the fused forward does not compute.
    """
    taken = conflicting_names(fused, layer, attributes)
    if taken:
        raise CannotStandIn(f"it defines {_listed(taken)}, which the fused layer uses for something else")
    classes = {class_of(module) for module in layer.modules()}
    left = frozenset[str]().union(*(unread_stores(cls, stores_of(cls)) for cls in classes))
    if left:
        raise CannotStandIn(
            f"its forward stores {_listed(sorted(left))} for other code to read, which the fused layer does not compute"
        )
    made = empty(fused, type(layer))
    # The hooks' dictionaries are shared on purpose: what transformers installs on either is seen by both.
    made.__dict__.update(carried_attributes(layer))
    hooks = [hook for child in layer.modules() if child is not layer for hook in forward_hooks(child)]
    made.__dict__.update(_modules=dict(layer._modules), _hooks_inside=tuple(hooks), **attributes)
    return made
