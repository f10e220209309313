"""Fused modules keep the class of what they stand for: isinstance checks, class attributes and other methods go on working."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from hf_cpu_accel.patching.class_code import names_kept
from hf_cpu_accel.patching.hooks import (
    carried_attributes,
    forward_hooks,
    has_foreign_hook,
    is_collecting_inside,
)
from hf_cpu_accel.patching.inside import Inside, class_of, is_package_class


@dataclass(frozen=True)
class Reference:
    """How the own forward of a part is called for the same as its fused one.

    Attributes:
        args, kwargs: without what it would write to.
        tokens: bool [B, L], the rows that count, or None for all.
        moves_rows: whether a few rows may be moved by rounding (experts are chosen among nearly equal ones).
        dtype: what the fused call keeps its numbers in where that is less than the weights have (a cache), else None.
        caches: the caches and mappings that the fused call writes to, each with the index of the layer's part of it.
        is_repeatable: whether it may be made several times.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: Tensor | None = None
    moves_rows: bool = False
    dtype: str | None = None
    caches: tuple[tuple[Any, int | None], ...] = ()
    is_repeatable: bool = True


class CannotStandIn(Exception):
    """No fused forward can take the place of a module's own without that being seen."""


# What every module has, and classes say anew.
_OF_MODULES = frozenset((*vars(nn.Module), *vars(nn.Module()), *vars(type("Empty", (nn.Module,), {}))))
_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


class FusedModuleMixin(nn.Module):
    """A fused forward to be mixed into other classes; copies and pickles name the two classes instead of the mixture."""

    _fused_class: type[nn.Module]
    _original_class: type[nn.Module]
    _hooks_inside: tuple[dict[int, Any], ...] = ()
    _inside: Inside | None = None  # from when the model is accelerated
    _told_by_attributes: ClassVar[bool] = True
    _followed: tuple[str, ...] = ()  # attributes of the host's that each fused call goes by

    @property
    def is_edited(self) -> bool:
        """Whether hooks of the user look at (or change) what passes between the modules inside, or these are no longer what they
        were: the class's own forward has to be run."""
        if any(self._hooks_inside) and any(map(has_foreign_hook, self._hooks_inside)):
            return True
        return self._inside is not None and self._inside.has_changed()

    @property
    def is_watched(self) -> bool:
        """The same, or whether a caller asked transformers for what passes inside."""
        return (any(self._hooks_inside) and is_collecting_inside()) or self.is_edited

    @property
    def is_watched_within(self) -> bool:
        """The same of a layer, whose own outputs are the hidden states that callers ask for."""
        return (any(self._hooks_inside) and is_collecting_inside(but_hidden_states=True)) or self.is_edited

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        """How the own forward is called to be compared with a fused call of these arguments; None if this call is not fused, or
        cannot be made twice. Parts that do not define it are not compared."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return empty, (self._fused_class, self._original_class), self.__getstate__()


def note_insides(root: nn.Module) -> None:
    """From now on, what is put in the place of modules inside of fused ones counts. To be called when all are fused."""
    for module in root.modules():
        if isinstance(module, FusedModuleMixin):
            module._inside = Inside(
                module, by_attributes=module._told_by_attributes, followed=module._followed
            )


def mixed_class(fused: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """The class that is `fused` first and `original` besides; the same for the same two."""
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


def names_taken(fused: type[nn.Module], layer: nn.Module, attributes: Iterable[str] = ()) -> list[str]:
    """What `layer` has under names that are others' in `fused`, or are among `attributes`, in alphabetical order."""
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
    """What `cls` adds to `nn.Module`."""
    return (base for base in cls.__mro__ if issubclass(base, nn.Module) and base is not nn.Module)


def empty(fused: type[nn.Module], original: type[nn.Module]) -> nn.Module:
    """An instance without attributes, not even a module's own."""
    cls = mixed_class(fused, original)
    return cls.__new__(cls)


def fused_layer(fused: type[nn.Module], layer: nn.Module, **attributes: Any) -> Any:
    """`layer` with the forward of `fused` and with `attributes`; the original is not changed.

    `_hooks_inside` tells the hooks of the modules in it, present and future ones.

    Raises:
        CannotStandIn: the own forward, which runs where the fused one does not, could no longer read what it reads; or it leaves
            something in attributes for others, which a fused one does not make.
    """
    taken = names_taken(fused, layer, attributes)
    if taken:
        raise CannotStandIn(f"it defines {_listed(taken)}, which the fused layer uses for something else")
    kept = sorted(frozenset[str]().union(*(names_kept(class_of(module)) for module in layer.modules())))
    if kept:
        raise CannotStandIn(
            f"its forward stores {_listed(kept)} for other code to read, which the fused layer does not compute"
        )
    made = empty(fused, type(layer))
    # The hooks' dictionaries are shared on purpose: what transformers installs on either is seen by both.
    made.__dict__.update(carried_attributes(layer))
    hooks = [hook for child in layer.modules() if child is not layer for hook in forward_hooks(child)]
    made.__dict__.update(_modules=dict(layer._modules), _hooks_inside=tuple(hooks), **attributes)
    return made
