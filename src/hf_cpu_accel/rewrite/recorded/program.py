"""A list of steps, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ref:
    """The result of a step, or an input."""

    number: int


@dataclass(frozen=True)
class Step:
    """One call.

    Attributes:
        function: what is called. It keeps nothing and reads nothing but its arguments and weights.
        args, kwargs: with a `Ref` for what steps before it gave.
        result: what is kept of it, None if nothing.
        effect: whether it has to be called even if nobody reads its result.
        leaf: the module of ours whose call this is, or None.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Ref
    effect: bool = False
    leaf: Any = None

    @property
    def reads(self) -> list[Ref]:
        return list(refs_in((self.args, self.kwargs)))


class Mismatch(Exception):
    """A size is another one than the steps are for."""


def expect(value: Any, expected: Any) -> None:
    """
    Raises:
        Mismatch: they differ.
    """
    if value != expected:
        raise Mismatch


def size_of(tensor: Any, dim: int) -> Any:
    """A size, counted from the last: `dim` is negative."""
    return tensor.size(dim)


def refs_in(value: Any) -> Iterator[Ref]:
    """All of them, in lists, tuples, dicts and slices."""
    if isinstance(value, Ref):
        yield value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, tuple | list):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
    for part in parts:
        yield from refs_in(part)


def replaced(value: Any, find: Callable[[Ref], Any]) -> Any:
    """`value` with `find(ref)` in the place of each."""
    if isinstance(value, Ref):
        return find(value)
    if isinstance(value, tuple | list):
        return type(value)([replaced(part, find) for part in value])
    if isinstance(value, dict):
        return {key: replaced(part, find) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(replaced(part, find) for part in (value.start, value.stop, value.step)))
    return value


_Call = tuple[Callable[..., Any], tuple[int, ...], tuple[tuple[str, int], ...], int, tuple[int, ...]]


@dataclass
class Program:
    """Steps from inputs to an output, in registers.

    Args:
        inputs: how many there are; they are the first refs.
        steps: in their order.
        output: what is returned, with refs in it.
        writes_over: whether a step writes over what nobody can put back; all that may raise a `Mismatch` come before it.
    """

    inputs: int
    steps: Sequence[Step]
    output: Any
    writes_over: bool = False
    _registers: list[Any] = field(init=False, default_factory=list)
    _calls: list[_Call] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._registers = [None] * self.inputs
        self._places: dict[Ref, int] = {Ref(number): number for number in range(self.inputs)}
        calls: list[tuple[Any, tuple[int, ...], tuple[tuple[str, int], ...], int]] = []
        for step in self.steps:
            args = tuple(self._place(arg, calls) for arg in step.args)
            kwargs = tuple((name, self._place(arg, calls)) for name, arg in step.kwargs.items())
            place = self._places[step.result] = self._new(None)
            calls.append((step.function, args, kwargs, place))
        self._result = self._place(self.output, calls, is_new=True)
        last: dict[int, int] = {}  # of each register that a call gives: the call after which nobody reads it
        for number, (_, args, kwargs, place) in enumerate(calls):
            last[place] = number
            for read in (*args, *(place for _, place in kwargs)):
                if read in last:
                    last[read] = number
        last.pop(self._result, None)
        for number, call in enumerate(calls):
            touched = {*call[1], *(place for _, place in call[2]), call[3]}
            dead = tuple(place for place in touched if last.get(place) == number)
            self._calls.append((*call, dead))

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """
        Raises:
            Mismatch: the steps are for other sizes.
        """
        registers = self._registers.copy()
        registers[: self.inputs] = inputs
        for function, args, kwargs, place, dead in self._calls:
            given = [registers[arg] for arg in args]
            if kwargs:
                registers[place] = function(*given, **{name: registers[arg] for name, arg in kwargs})
            else:
                registers[place] = function(*given)
            for number in dead:
                registers[number] = None
        return registers[self._result]

    def _new(self, value: Any) -> int:
        self._registers.append(value)
        return len(self._registers) - 1

    def _place(self, value: Any, calls: list[Any], *, is_new: bool = False) -> int:
        """The register of an argument; what holds refs is built by calls of its own.

        Args:
            is_new: it is handed out: lists and dictionaries are built, as who gets them may write to them.
        """
        if isinstance(value, Ref):
            return self._places[value]
        if not any(True for _ in refs_in(value)) and not (is_new and isinstance(value, list | dict | tuple)):
            return self._new(value)
        function: Callable[..., Any]
        if isinstance(value, slice):
            function, parts = slice, [value.start, value.stop, value.step]
        elif isinstance(value, dict):
            function, parts = _dict_of(tuple(value)), list(value.values())
        else:
            function, parts = (_listed if isinstance(value, list) else _tupled), list(value)
        args = tuple(self._place(part, calls, is_new=is_new) for part in parts)
        place = self._new(None)
        calls.append((function, args, (), place))
        return place


def _tupled(*parts: Any) -> tuple[Any, ...]:
    return parts


def _listed(*parts: Any) -> list[Any]:
    return list(parts)


def _dict_of(names: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
    return lambda *values: dict(zip(names, values, strict=True))
