"""A list of steps, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
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
        effect: whether it has to be called even if its result is not read.
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


def replace_refs(value: Any, find: Callable[[Ref], Any]) -> Any:
    """`value` with `find(ref)` in the place of each."""
    if isinstance(value, Ref):
        return find(value)
    if isinstance(value, tuple | list):
        return type(value)([replace_refs(part, find) for part in value])
    if isinstance(value, dict):
        return {key: replace_refs(part, find) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(replace_refs(part, find) for part in (value.start, value.stop, value.step)))
    return value


@dataclass
class Program:
    """Steps from inputs to an output, as one function of Python's that calls one after another.

    Args:
        inputs: how many there are; they are the first refs.
        steps: in their order.
        output: what is returned, with refs in it.
        writes_over: whether a step writes over what cannot be put back; all that may raise a `Mismatch` come before it.
    """

    inputs: int
    steps: Sequence[Step]
    output: Any
    writes_over: bool = False
    _run: Callable[..., Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._run = _Source().function(self.inputs, self.steps, self.output)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """
        Raises:
            Mismatch: the steps are for other sizes.
        """
        return self._run(*inputs)


class _Source:
    """Writes a function: a line for each step, and names for what it calls and for what stays the same."""

    def __init__(self) -> None:
        self._constants: dict[str, Any] = {}

    def function(self, inputs: int, steps: Sequence[Step], output: Any) -> Callable[..., Any]:
        last: dict[Ref, int] = {}  # the last step that reads a result
        for number, step in enumerate(steps):
            last.update(dict.fromkeys((step.result, *step.reads), number))
        kept = {*refs_in(output), *map(Ref, range(inputs))}
        dead: dict[int, list[str]] = {}
        for ref, number in last.items():
            if ref not in kept:
                dead.setdefault(number, []).append(_name(ref))
        lines = [f"def run({', '.join(map(_name, map(Ref, range(inputs))))}):"]
        for number, step in enumerate(steps):
            args = [self._value(arg) for arg in step.args]
            if all(name.isidentifier() and not iskeyword(name) for name in step.kwargs):
                args += [f"{name}={self._value(arg)}" for name, arg in step.kwargs.items()]
            else:
                args.append(f"**{self._value(step.kwargs, is_new=True)}")
            lines.append(f"    {_name(step.result)} = {self._constant(step.function)}({', '.join(args)})")
            if number in dead:
                lines.append(f"    {' = '.join(dead[number])} = None")
        lines.append(f"    return {self._value(output, is_new=True)}")
        names = dict(self._constants)
        exec("\n".join(lines), names)
        function: Callable[..., Any] = names["run"]
        return function

    def _value(self, value: Any, *, is_new: bool = False) -> str:
        """An expression.

        Args:
            is_new: it is handed out: lists and dictionaries are made, as who gets them may write to them.
        """
        if isinstance(value, Ref):
            return _name(value)
        if not is_new and not any(True for _ in refs_in(value)):
            return self._constant(value)
        if isinstance(value, slice):
            return f"slice({self._value(value.start)}, {self._value(value.stop)}, {self._value(value.step)})"
        if isinstance(value, dict):
            pairs = (f"{self._constant(k)}: {self._value(part, is_new=is_new)}" for k, part in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, tuple | list):
            parts = "".join(f"{self._value(part, is_new=is_new)}, " for part in value)
            return f"[{parts}]" if isinstance(value, list) else f"({parts})"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name


def _name(ref: Ref) -> str:
    return f"v{ref.number}"
