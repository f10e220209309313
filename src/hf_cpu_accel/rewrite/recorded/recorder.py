"""Notes what a call asks torch and our modules for, as steps that can be taken again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_cpu_accel.patching.fused_module import FusedModuleMixin
from hf_cpu_accel.rewrite.core.foreign_code import ours
from hf_cpu_accel.rewrite.core.recordable import RECORDER
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.recorded.held import Held, address, is_ours, tensors_in, tensors_of
from hf_cpu_accel.rewrite.recorded.program import Ref, Step, expect, size_of
from hf_cpu_accel.rewrite.recurrent.layer import RecurrentMixer
from hf_cpu_accel.rewrite.recorded.size import Size, Sizes, StandIn, plain
from hf_cpu_accel.rewrite.recorded.stand_in import CacheStandIn, recurrent_state

# What these say follows from the form of the call, which a program is for, or is the same for all tensors that a layer sees.
_FORM = frozenset(
    {"dim", "ndim", "is_floating_point", "is_complex", "element_size", "itemsize", "requires_grad"}
    | {"is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested"}
)
# What a step may have for an argument besides tensors and modules, and lists, tuples, dictionaries and slices of these.
_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, Enum, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, type, FunctionType, BuiltinFunctionType),
)
# They give the very tensor that they are given where its strides are as they are wanted.
_MAY_COPY = frozenset(
    {Tensor.contiguous, Tensor.reshape, Tensor.flatten, torch.flatten, torch.reshape, Tensor.expand}
)


class Recorder(TorchFunctionMode):
    """Inside, what this thread asks torch for is noted.

    Args:
        shadow: of the layer that is called.
        inputs: the tensors, ints and caches that it is called with, each once.
        index: of the layer's part of a cache.
    """

    def __init__(self, shadow: Shadow, inputs: list[Any], index: int | None = None) -> None:
        super().__init__()
        self.shadow = shadow
        self.steps: list[Step] = []
        self._index = index
        self._count = 0
        self._refs: dict[int, Ref] = {}
        self._of_sizes: dict[Any, Ref] = {}  # what was computed of sizes, which do not change
        self._alive: list[Any] = []  # what was noted by its id
        self._written: set[int] = set()  # addresses
        self._uncopied: set[int] = set()
        self._depth = 0  # of the modules and functions of ours that are at work
        self._held = {id(t): (m, n) for m in shadow.module.modules() for n, t in tensors_of(m)}
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        held = [t for m in shadow.module.modules() for _, t in tensors_of(m)]
        self._protected = {address(tensor) for tensor in (*tensors, *held)} - {0}
        self.inputs = [self._input(value) for value in inputs]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """For the call of the shadow."""
        for module in self.shadow.module.modules():
            if module is not self.shadow.module and is_ours(module):
                vars(module)["forward"] = self._leaf(module)
        token = RECORDER.set(self.called)
        try:
            with self:
                yield
        finally:
            RECORDER.reset(token)
            self._depth = 1  # sizes that were handed on are plain from now on
            for module in self.shadow.module.modules():
                vars(module).pop("forward", None)

    @property
    def is_ambiguous(self) -> bool:
        """Whether a tensor was written to that has two names, and may be two in another call."""
        return not self._written.isdisjoint(self._uncopied)

    def forget(self) -> None:
        """Hold nothing of the call any more: a size may have been kept, which knows its recorder."""
        self._refs, self._alive, self._held, self._of_sizes, self.inputs = {}, [], {}, {}, []

    def refs(self, value: Any) -> Any:
        """`value`, which was made inside, with refs.

        Raises:
            Refused: it holds a tensor from elsewhere, or what may hold some unseen.
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
        if isinstance(value, _CONSTANTS):
            return value
        raise Refused(Refusal(f"it hands on a {type(value).__name__}, which no step can take or give"))

    def called(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaf: Any = None,
        *,
        effect: bool = False,
    ) -> Any:
        """A call of ours: one step.

        Args:
            leaf: (what is called of it, itself) of a module, which `function` is the forward of a shadow of.
            effect: whether it changes a cache; a module that is given one does.
        """
        if self._depth:
            return function(*args, **kwargs)
        self._depth += 1
        try:
            output = function(*plain(args), **plain(kwargs))
            if function is recurrent_state and output is not None:
                self._protected.add(address(output))
        finally:
            self._depth -= 1
        with ours():
            called, module = leaf or (function, None)
            if leaf is not None and _holds_stand_in((args, kwargs)):
                if isinstance(module, RecurrentMixer):
                    raise Refused(Refusal("a recurrence in it is an op that writes over what its cache holds"))
                effect = True
            step = self._step(called, self.refs(args), self.refs(kwargs), effect=effect, leaf=module)
            self._keep(output, step)
            return output

    # The notes of caches

    def number(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What a cache is asked for that is no tensor."""
        with ours():
            return self._numbers(self._step(function, self.refs(args), {}), function(*plain(args)))

    def stand_in(self, made: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`made`, which stands for what `function` gives."""
        with ours():
            self._refs[id(made)] = self._step(function, self.refs(args), {})
            self._alive.append(made)
            return made

    # The notes of sizes

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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        self._depth += 1
        try:
            versions = [(t, t._version) for t in tensors_in((args, kwargs)) if not t.is_inference()]
            output = func(*plain(args), **plain(kwargs))
        finally:
            self._depth -= 1
        with ours():
            written = [t for t, version in versions if t._version != version]
            if any(address(t) in self._protected for t in written):
                raise Refused(Refusal("it writes to what it is given, or to its weights"))
            self._written.update(map(address, written))
            if func in _MAY_COPY and output is args[0]:
                self._uncopied.add(address(output))
            return self._told(func, args, kwargs, output, bool(written))

    def _told(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any, writes: bool) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if isinstance(output, torch.Size) and name in ("size", "shape"):
            owner = self._ref(args[0])
            return Sizes(
                self._size(self._of_size(size_of, (owner, n - len(output))), size)
                for n, size in enumerate(output)
            )
        if type(output) is int and name == "size" and len(args) == 2 and type(args[1]) is int:
            dim = args[1] if args[1] < 0 else args[1] - args[0].dim()
            return self._size(self._of_size(size_of, (self._ref(args[0]), dim)), output)
        if type(output) is int and name in ("size", "numel", "__len__"):
            size = self._size(self._step(func, self.refs(args), self.refs(kwargs)), output)
            return int(size) if name == "__len__" else size
        if name in ("item", "tolist", "__bool__"):
            return self._numbers(self._step(func, self.refs(args), self.refs(kwargs)), output)
        if isinstance(output, torch.dtype | torch.device | torch.layout):
            return output
        if isinstance(output, bool | int) and name in _FORM:
            return output
        if output is None and not writes and name != "__set__":
            return output
        if next(tensors_in(output), None) is None and _is_plain((args, kwargs)):
            return output  # of what is torn down meanwhile, for one
        if name == "__set__" or (output is not None and next(tensors_in(output), None) is None):
            raise Refused(Refusal(f"what it does depends on numbers ({name} of a tensor is read)"))
        if func is Tensor.type_as:  # which would read the other for its dtype alone
            func, args = Tensor.to, (args[0], output.dtype)
        result = self._step(func, self.refs(args), self.refs(kwargs), effect=writes)
        if type(output) in (tuple, list):
            self._expect_length(result, output)  # that of a split follows from sizes
        self._keep(output, result)
        return output

    def _numbers(self, ref: Ref, value: Any) -> Any:
        """What was read of a tensor: ints are sizes, and anything else has to be the same again."""
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
        """Know `output` and the tensors in it by their ids."""
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
        """What is computed of sizes alone: once."""
        args = args if function is size_of else self.refs(args)
        known = self._of_sizes.get((function, args))
        if known is None:
            known = self._of_sizes[function, args] = self._step(function, args, {})
        return known

    def _size(self, ref: Ref, value: int) -> Size:
        size = Size(value, self)
        self._refs[id(size)] = ref
        self._alive.append(size)
        return size

    def _input(self, value: Any) -> Any:
        ref = self._new()
        if type(value) is int:
            return self._size(ref, value)
        if not isinstance(value, Tensor):
            assert self._index is not None
            made = CacheStandIn(value, self._index, self)
            self._refs[id(made)] = ref
            self._alive.append(made)
            return made
        self._keep(value, ref)
        return value

    def _ref(self, tensor: Tensor) -> Ref:
        known = self._refs.get(id(tensor))
        if known is not None:
            return known
        held = self._held.get(id(tensor))
        if held is None:
            raise Refused(
                Refusal("it uses a tensor that is neither given to it nor a parameter or buffer of its own")
            )
        module, name = held
        ref = self._step(Held(self.shadow.original(module), name), (), {})
        self._keep(tensor, ref)
        return ref

    def _leaf(self, module: nn.Module) -> Any:
        """What stands for the forward of a shadow while it is noted."""
        forward = type(module).forward.__get__(module)
        original = self.shadow.original(module)
        # What is looked at by hooks is called as a module; the forward of others saves a Python call.
        called = original if isinstance(original, FusedModuleMixin) else original.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            return self.called(forward, args, kwargs, leaf=(called, original))

        return noted


def _holds_stand_in(value: Any) -> bool:
    if isinstance(value, tuple | list | dict):
        return any(map(_holds_stand_in, value.values() if isinstance(value, dict) else value))
    return issubclass(type(value), StandIn)


def _is_plain(value: Any) -> bool:
    """Whether there are neither tensors nor sizes in it."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, type(None) | bool | int | float | str) and not isinstance(value, Size)
