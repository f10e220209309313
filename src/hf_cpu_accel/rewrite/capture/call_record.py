"""The record of a call: its steps, and the refs of its tensors, sizes and caches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.rewrite.capture.program import Ref, Step, expect, size_of
from hf_cpu_accel.rewrite.capture.size import Hashed, Size, Sizes, StandIn, plain
from hf_cpu_accel.rewrite.capture.tensor_reader import ParameterReader, tensors_of
from hf_cpu_accel.rewrite.capture.torch_functions import CONSTANTS
from hf_cpu_accel.rewrite.core.foreign_code import OwnError, ours
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow

FOREIGN = Refusal("it uses a tensor that is not an argument, parameter or buffer of it")


class CallRecord:
    """The steps of a call, and the refs of its values.

    Args:
        shadow: of the layer that is called.
        fixed: the sizes that must stay equal, as plain ints; ops on others are recorded. None: all of them.
    """

    def __init__(self, shadow: Shadow, *, fixed: Collection[Ref] | None = ()) -> None:
        self.shadow, self._fixed = shadow, fixed
        self.steps: list[Step] = []
        self.inputs: list[Any] = []
        self._count = 0
        self._depth = 0  # of running modules and functions of this package
        self._refs: dict[int, Ref] = {}
        self._of_sizes: dict[Any, Ref] = {}  # what was computed of sizes, which do not change
        self._alive: list[Any] = []  # values whose ids are used
        self._held: dict[int, tuple[nn.Module, str] | None] = {}  # None: it has two names, which may diverge
        for module in shadow.module.modules():
            for name, tensor in tensors_of(module):
                self._held[id(tensor)] = None if id(tensor) in self._held else (module, name)

    def forget(self) -> None:
        """Release the values of the call: code may have kept a size, which refers to its recorder."""
        self._refs, self._alive, self._held, self._of_sizes = {}, [], {}, {}
        self.inputs = []

    def refs(self, value: Any) -> Any:
        """Return `value`, which was created in the call, with refs in place of tensors.

        Raises:
            Refused: it holds a tensor from elsewhere, or an object that may hold one.
        """
        if issubclass(type(value), StandIn):
            return self._refs[id(value)]
        if isinstance(value, Tensor):
            return self._ref(value)
        if isinstance(value, Size):
            return self._refs.get(id(value), value.plain)
        if isinstance(value, nn.Module):
            return self.shadow.original(value)
        if isinstance(value, slice):
            return slice(*(self.refs(part) for part in (value.start, value.stop, value.step)))
        if type(value) in (tuple, list, Sizes, torch.Size):
            return (list if type(value) is list else tuple)([self.refs(part) for part in value])
        if type(value) is dict:
            return {key: self.refs(part) for key, part in value.items()}
        if isinstance(value, CONSTANTS):
            return value
        raise Refused(
            Refusal(f"it passes a {type(value).__name__} between operations, which is not recorded")
        )

    def number(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return a number that a cache returns, as a size."""
        with ours():
            return self._numbers(self._step(function, self.refs(args), {}), function(*plain(args)))

    def stand_in(self, made: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return `made`, the stand-in for the result of `function`."""
        with ours():
            self._refs[id(made)] = self._step(function, self.refs(args), {})
            self._alive.append(made)
            return made

    def computed(self, function: Callable[..., int], args: tuple[Any, ...], value: int) -> int:
        if self._depth:
            return value
        made: Any = self._size(self._of_size(function, args), value)
        return made

    def expect(self, function: Callable[..., Any], args: tuple[Any, ...], value: Any) -> None:
        if not self._depth:
            self._expect(
                self._of_size(function, args) if function is not operator.pos else self.refs(args)[0], value
            )

    def hashed(self, size: Any) -> None:
        """Stop the recording because a size is used as a key.

        Raises:
            OwnError: of `Hashed`.
        """
        if not self._depth:
            raise OwnError(Hashed(self._refs[id(size)]))

    def _numbers(self, ref: Ref, value: Any) -> Any:
        """Return the values that were read from a tensor: ints as sizes; others must stay equal."""
        if type(value) is list:
            self._expect_length(ref, value)
            return [self._numbers(self._step(operator.getitem, (ref, n), {}), v) for n, v in enumerate(value)]
        if type(value) is int:
            return self._size(ref, value)
        self._expect(ref, value)
        return value

    def _expect(self, ref: Ref, value: Any) -> None:
        if (expect, ref) not in self._of_sizes:
            self._of_sizes[expect, ref] = self._step(expect, (ref, value), {}, effect=True)

    def _expect_length(self, ref: Ref, values: Any) -> None:
        self._expect(self._step(len, (ref,), {}), len(values))

    def _keep(self, output: Any, result: Ref) -> None:
        """Record the refs of `output` and of the tensors in it, by id."""
        if isinstance(output, Tensor):
            self._refs[id(output)] = result
            self._alive.append(output)
        elif isinstance(output, tuple | list):
            for number, part in enumerate(output):
                if isinstance(part, Tensor | tuple | list):
                    self._keep(part, self._step(operator.getitem, (result, number), {}))

    def _step(
        self, function: Any, args: Any, kwargs: dict[str, Any], *, effect: bool = False, leaf: Any = None
    ) -> Ref:
        step = Step(function, args, kwargs, self._new(), effect, leaf)
        self.steps.append(step)
        return step.result

    def _new(self) -> Ref:
        self._count += 1
        return Ref(self._count - 1)

    def _of_size(self, function: Any, args: Any) -> Ref:
        """Return the ref of a value that is computed from sizes alone, computed once."""
        args = args if function is size_of else self.refs(args)
        known = self._of_sizes.get((function, args))
        if known is None:
            known = self._of_sizes[function, args] = self._step(function, args, {})
        return known

    def _size(self, ref: Ref, value: int) -> Any:
        if self._fixed is None or ref in self._fixed:
            self._expect(ref, value)
            return value
        size = Size(value, self)
        self._refs[id(size)] = ref
        self._alive.append(size)
        return size

    def _ref(self, tensor: Tensor) -> Ref:
        known = self._refs.get(id(tensor))
        if known is not None:
            return known
        held = self._held.get(id(tensor))
        if held is None:
            raise Refused(FOREIGN)
        module, name = held
        ref = self._step(ParameterReader(self.shadow.original(module), name), (), {})
        self._keep(tensor, ref)
        return ref
