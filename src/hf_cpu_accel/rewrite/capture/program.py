"""A list of steps, and the function that runs them."""

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
        function: the function. It stores nothing and reads only its arguments and weights.
        args, kwargs: with a `Ref` for results of earlier steps.
        result: the ref of its result, or None.
        effect: whether it has to run even if its result is not read.
        leaf: the module of this package that is called, or None.
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
    """A size differs from the sizes that the steps support."""


def expect(value: Any, expected: Any) -> None:
    """Check that a value is the expected one.

    Raises:
        Mismatch: they differ.
    """
    if value != expected:
        raise Mismatch


def size_of(tensor: Any, dim: int) -> Any:
    """Return a size, counted from the last dimension: `dim` is negative."""
    return tensor.size(dim)


def refs_in(value: Any) -> Iterator[Ref]:
    """Yield all refs in lists, tuples, dicts and slices."""
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
    """Return `value` with `find(ref)` in place of each ref."""
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
    """Steps from inputs to an output, as one Python function that calls one after another.

    Args:
        inputs: the number of inputs, which are the first refs.
        steps: in their order.
        output: the output, with refs in it.
        writes_over: whether a step overwrites states that cannot be restored; steps that may raise a `Mismatch` come before it.
    """

    inputs: int
    steps: Sequence[Step]
    output: Any
    writes_over: bool = False
    _run: Callable[..., Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._run = _Source().function(self.inputs, self.steps, self.output)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run the steps.

        Raises:
            Mismatch: the steps do not support these sizes.
        """
        return self._run(*inputs)


class _Source:
    """Source code of a function: a line for each step, and names for its functions and constants."""

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
        """Return an expression.

        Args:
            is_new: whether the value leaves the function: lists and dictionaries are created, since the receiver may write to
                them.
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
