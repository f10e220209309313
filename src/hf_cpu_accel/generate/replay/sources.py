"""Sources of the arguments of an op in every step, as two captured steps show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Name = tuple[Any, ...]
NameOf = Callable[[Tensor], Name | None]


class CannotReplay(Exception):
    """The steps of this model do not run the same ops every time; the message gives the reason."""


@dataclass(frozen=True)
class Past:
    """Placeholder for an integer argument of an op: the number of tokens in a cache layer."""

    name: Name


class Source:
    """The source of an argument; `reads` has the names of the tensors it is made of."""

    reads: tuple[Name, ...] = ()

    def value(self, known: Mapping[Name, Any], tokens: int) -> Any:
        """Return the argument. `known` has the inputs and results of this step by name; `tokens` counts
        those of the text since the first captured step."""
        raise NotImplementedError

    def is_source_of(self, value: Any, name_of: NameOf, tokens: int) -> bool:
        """Return whether the argument would be `value` in a captured step, whose tensors have names by `name_of`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Source):
    """The same value in each step: a weight, a number, a dtype, or a list of these."""

    constant: Any

    def value(self, known: Mapping[Name, Any], tokens: int) -> Any:
        return self.constant

    def is_source_of(self, value: Any, name_of: NameOf, tokens: int) -> bool:
        return _is_same(self.constant, value, name_of)


@dataclass(frozen=True)
class Named(Source):
    """An input of the step, an output of an earlier op, or the contents of the cache."""

    name: Name

    @property
    def reads(self) -> tuple[Name, ...]:  # type: ignore[override]
        return (self.name,)

    def value(self, known: Mapping[Name, Any], tokens: int) -> Any:
        return known[self.name]

    def is_source_of(self, value: Any, name_of: NameOf, tokens: int) -> bool:
        return self.name == (name_of(value) if isinstance(value, Tensor) else getattr(value, "name", None))


@dataclass(frozen=True)
class Copied(Source):
    """A tensor that Python creates from the same numbers in each step."""

    original: Tensor

    def value(self, known: Mapping[Name, Any], tokens: int) -> Any:
        return self.original.clone()

    def is_source_of(self, value: Any, name_of: NameOf, tokens: int) -> bool:
        return isinstance(value, Tensor) and name_of(value) is None and _are_equal(self.original, value)


@dataclass(frozen=True)
class Counted(Source):
    """A number that grows by the same amount with each token of the text."""

    first: int
    more: int

    def value(self, known: Mapping[Name, Any], tokens: int) -> Any:
        return self.first + tokens * self.more

    def is_source_of(self, value: Any, name_of: NameOf, tokens: int) -> bool:
        return type(value) is int and value == self.first + tokens * self.more


@dataclass(frozen=True)
class Several(Source):
    """A list of values from different sources."""

    sources: tuple[Source, ...]

    @property
    def reads(self) -> tuple[Name, ...]:  # type: ignore[override]
        return tuple(name for source in self.sources for name in source.reads)

    def value(self, known: Mapping[Name, Any], tokens: int) -> Any:
        return [source.value(known, tokens) for source in self.sources]

    def is_source_of(self, value: Any, name_of: NameOf, tokens: int) -> bool:
        return (
            isinstance(value, list | tuple)
            and len(value) == len(self.sources)
            and all(map(lambda source, part: source.is_source_of(part, name_of, tokens), self.sources, value))
        )


def source_of(
    first: Any, second: Any, name_first: NameOf, name_second: NameOf, *, apart: int, is_new: bool
) -> Source:
    """Return the source of an argument that was `first` and then `second` in two captured steps.

    Args:
        apart: how many tokens longer the text was in the second one.
        is_new: whether it may be a tensor that Python has just created from numbers.

    Raises:
        CannotReplay: they do not determine the value in the next step.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        name = name_first(first)
        if is_new and name is None and name_second(second) is None and _are_equal(first, second):
            return Copied(first)
        if name != name_second(second) or (name is None and first is not second):
            raise CannotReplay(
                f"a tensor of shape {tuple(first.shape)} from outside the captured ops changes in each step"
            )
        return Constant(first) if name is None else Named(name)
    if isinstance(first, Past) and first == second:
        return Named(first.name)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        parts = tuple(
            source_of(one, other, name_first, name_second, apart=apart, is_new=is_new)
            for one, other in zip(first, second, strict=True)
        )
        return Constant(second) if all(isinstance(part, Constant) for part in parts) else Several(parts)
    if type(first) is int and type(second) is int and first != second:
        return Counted(first, growth(first, second, apart))
    if type(first) is not type(second) or first != second:
        raise CannotReplay(f"an argument changed from {first!r} to {second!r}")
    return Constant(first)


def growth(first: int, second: int, apart: int) -> int:
    """Return by how much a number grows with each token, where it was `first` and, `apart` tokens later, `second`.

    Raises:
        CannotReplay: it grows by a fraction.
    """
    more, rest = divmod(second - first, apart)
    if rest:
        raise CannotReplay(f"a number changed from {first} to {second} within {apart} tokens")
    return more


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


def _is_same(constant: Any, value: Any, name_of: NameOf) -> bool:
    if isinstance(constant, Tensor):
        return constant is value and name_of(value) is None
    if isinstance(constant, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(constant) == len(value)
            and all(map(lambda one, other: _is_same(one, other, name_of), constant, value))
        )
    return type(constant) is type(value) and bool(constant == value)
