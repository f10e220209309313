"""Changes to a model, as values that can undo themselves, and the journal that holds them in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from hf_cpu_accel.patching.hooks import move_hooks, share_hooks
from hf_cpu_accel.patching.interruption import Uninterrupted
from hf_cpu_accel.patching.originals import OriginalsStore, Ticket


class Change(Protocol):
    """One change.

    `undo` can be called for a change that was not made yet, and again after an interruption or after it succeeded: an
    interruption may come between any two steps.
    """

    def undo(self) -> None: ...


class Journal:
    """The changes of one model. Each is recorded before it is made, so a failure at any point can be undone.

    Changes are plain values that refer to modules and parameters: deep copies and pickles of the model include the journal, and
    can be restored like the model itself.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def record(self, change: Change) -> None:
        self.changes.append(change)

    def undo(self) -> None:
        """Undo the changes from the last to the first, releasing them one by one; signals wait until the end.

        If one fails (no memory, a disk that cannot be read), it and those before it stay for another call.
        """
        with Uninterrupted():
            while self.changes:
                self.changes[-1].undo()
                self.changes.pop()

    def check(self) -> None:
        """Raise an error before the first change is undone if a weight cannot be restored.

        Raises:
            RuntimeError: the original weights were dropped, or stayed in another process.
        """
        for change in self.changes:
            if isinstance(change, FreedWeight) and change.ticket is not None:
                change.store.check()
                return


SIZES = {
    "in_features",
    "out_features",
}  # hosts write these when a vocabulary is resized; no linear computes with them


@dataclass(frozen=True)
class SwappedModule:
    """A change: `parent.name` was `original`."""

    parent: nn.Module
    name: str
    original: nn.Module

    def undo(self) -> None:
        replacement = self.parent._modules[self.name]
        if replacement is self.original:
            return
        if replacement is not None:
            if replacement.training != self.original.training:
                self.original.train(replacement.training)  # model.train() reached the replacement only
            move_hooks(replacement, self.original)
            for name in SIZES & vars(self.original).keys() & vars(replacement).keys():
                vars(self.original)[name] = vars(replacement)[name]
        self.parent._modules[self.name] = self.original


class Packed(Protocol):
    """An object that holds the packed values of a parameter.

    Attributes:
        weight_dtype: dtype of the parameter for other code.
        is_of_linears: whether a quantized checkpoint stores these values as the tensors of linears.
    """

    @property
    def weight_dtype(self) -> torch.dtype: ...

    @property
    def is_of_linears(self) -> bool: ...

    def parameter_place(self) -> tuple[nn.Module, str]:
        """Return the module of the parameter, and its name there."""

    def unpack(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class FreedWeight:
    """A change: the values of `parameter` were released; they come from `store`, or exactly from the packed weight.

    `strides`: their original strides. `is_cast`: whether they follow `model.to(dtype)` meanwhile; weights of a quantized
    checkpoint do not.
    """

    parameter: torch.Tensor
    packed: Packed
    store: OriginalsStore
    ticket: Ticket | None
    strides: tuple[int, ...]
    is_cast: bool = True

    def undo(self) -> None:
        self.parameter.data = strided_as(self.values(), self.strides)

    @property
    def is_of_linears(self) -> bool:
        """Return whether `parameter` is a quantized tensor that its host saves as that of a linear."""
        return not self.is_cast and self.packed.is_of_linears

    def values(self) -> torch.Tensor:
        """Return the values of the parameter.

        Raises:
            RuntimeError: they were dropped, or stayed in another process.
        """
        values = self.packed.unpack() if self.ticket is None else self.store.get(self.ticket)
        return values.to(self.packed.weight_dtype if self.is_cast else self.parameter.dtype)


@dataclass(frozen=True)
class SharedValues:
    """A change: `tensor` had its values where `owner` has them."""

    tensor: torch.Tensor
    owner: torch.Tensor

    def undo(self) -> None:
        self.tensor.data = self.owner.data


@dataclass(frozen=True)
class FrozenParameters:
    """A change: these parameters required gradients."""

    parameters: list[nn.Parameter]

    def undo(self) -> None:
        for parameter in self.parameters:
            parameter.requires_grad_(True)


@dataclass(frozen=True)
class SwappedAttribute:
    """A change: `module.name`, a plain attribute, was `original`.

    Attributes that were set on the replacement meanwhile (a label map, an attention implementation) are copied back to the
    original.

    Attributes:
        ours: the attributes that this package set there, with their values, which are not copied back.
    """

    module: nn.Module
    name: str
    original: Any
    replacement: Any
    ours: dict[str, Any]
    before: dict[str, Any] = field(repr=False)

    def undo(self) -> None:
        setattr(self.module, self.name, self.original)
        for key, value in vars(self.replacement).items():
            unchanged = key in self.before and value is self.before[key]
            is_ours = key in self.ours and value == self.ours[key]
            if not unchanged and not is_ours:
                vars(self.original)[key] = value


@dataclass(frozen=True)
class AddedAttribute:
    """A change: `module` itself had no attribute `name`."""

    module: nn.Module
    name: str

    def undo(self) -> None:
        vars(self.module).pop(self.name, None)


@dataclass(frozen=True)
class ReplacedAttribute:
    """A change: `module.name`, an attribute of the module itself, was `original`."""

    module: nn.Module
    name: str
    original: Any

    def undo(self) -> None:
        vars(self.module)[self.name] = self.original


@dataclass(frozen=True)
class RemovedHook:
    """A change: `hooks`, which are called before a module's forward, began with `hook`, under `key`."""

    hooks: dict[int, Any]
    key: int
    hook: Any

    def undo(self) -> None:
        later = {key: hook for key, hook in self.hooks.items() if key != self.key}
        self.hooks.clear()
        self.hooks.update({self.key: self.hook, **later})


@dataclass(frozen=True)
class ThreadCount:
    """A change: torch ran `before` threads, and `ours` since."""

    before: int
    ours: int

    def undo(self) -> None:
        if torch.get_num_threads() == self.ours:  # else another count was chosen meanwhile
            torch.set_num_threads(self.before)


def swap_module(journal: Journal, slots: list[tuple[nn.Module, str]], replacement: nn.Module) -> None:
    """Put `replacement` in all places (parent, name) of one module."""
    for parent, name in slots:
        original = parent._modules[name]
        assert original is not None
        journal.record(SwappedModule(parent, name, original))
        share_hooks(original, replacement)
        parent._modules[name] = replacement


def remove_hook(journal: Journal, hooks: dict[int, Any], key: int) -> None:
    """Remove the first of `hooks`."""
    journal.record(RemovedHook(hooks, key, hooks[key]))
    del hooks[key]


def add_attribute(journal: Journal, module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute that `module` does not have itself; undoing it reveals the one of its class."""
    journal.record(AddedAttribute(module, name))
    setattr(module, name, value)


def replace_attribute(journal: Journal, module: nn.Module, name: str, value: Any) -> None:
    """Set a plain attribute, whether `module` itself has one of that name or not."""
    if name not in vars(module):
        add_attribute(journal, module, name, value)
        return
    journal.record(ReplacedAttribute(module, name, vars(module)[name]))
    setattr(module, name, value)


def free_weight(
    journal: Journal,
    parameter: torch.Tensor,
    packed: Packed,
    store: OriginalsStore,
    *,
    lossless: bool,
    is_cast: bool = True,
) -> None:
    """Release the values of `parameter`. The Parameter stays, so that `restore` returns the same object."""
    ticket = None if lossless else store.put(parameter.data)
    if lossless:
        store.give_back(parameter.data)
    journal.record(FreedWeight(parameter, packed, store, ticket, parameter.stride(), is_cast))
    parameter.data = torch.empty(0, dtype=parameter.dtype)


def share_values(journal: Journal, tensor: torch.Tensor, owner: torch.Tensor) -> None:
    """Release the values of `tensor`, which are those of `owner`. Call it before `owner` is freed."""
    journal.record(SharedValues(tensor, owner))
    tensor.data = torch.empty(0, dtype=tensor.dtype)


def strided_as(values: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return `values` in these strides, or unchanged if elements would share memory (an expanded parameter)."""
    if values.stride() == strides or _overlaps(values.shape, strides):
        return values
    return torch.empty_strided(values.shape, strides, dtype=values.dtype).copy_(values)


def _overlaps(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Return whether two elements may have one address."""
    reached = 1
    for step, size in sorted((step, size) for step, size in zip(strides, shape, strict=True) if size > 1):
        if step < reached:
            return True
        reached = step * size
    return False


def freeze_parameters(journal: Journal, module: nn.Module) -> None:
    """Make parameters require no gradients, so that a forward outside of `torch.no_grad()` works, too."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    journal.record(FrozenParameters(parameters))
    for parameter in parameters:
        parameter.requires_grad_(False)
