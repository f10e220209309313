"""Record the calls of torch and of modules of this package, as steps that can run again."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.patching.fused_module import FusedModuleMixin
from hf_cpu_accel.rewrite.capture.aliases import Aliases
from hf_cpu_accel.rewrite.capture.call_record import CallRecord
from hf_cpu_accel.rewrite.capture.program import Ref, size_of
from hf_cpu_accel.rewrite.capture.shared_states import SharedStandIn, is_shared, states_of
from hf_cpu_accel.rewrite.capture.size import Sizes, StandIn, plain
from hf_cpu_accel.rewrite.capture.stand_in import CacheStandIn, recurrent_state
from hf_cpu_accel.rewrite.capture.tensor_reader import address, is_package_module, tensors_in, tensors_of
from hf_cpu_accel.rewrite.capture.torch_functions import FORM, MAY_COPY, SQUEEZES, holds_constants_only
from hf_cpu_accel.rewrite.core.foreign_code import ours
from hf_cpu_accel.rewrite.core.recordable import RECORDER
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.runtime.context import within
from hf_cpu_accel.runtime.torch_modes import AroundFunctions

# Functions whose output is still referenced by its source.
_HANDED_OUT = frozenset({recurrent_state, states_of})


class Recorder(CallRecord):
    """Record the calls of this thread inside of `recording`.

    Args:
        shadow: of the layer that is called.
        inputs: the tensors, ints and caches of the call, each once.
        index: of the layer's part of a cache.
        fixed: the sizes that must stay equal, as plain ints; ops on others are recorded. None: all of them.
    """

    def __init__(
        self,
        shadow: Shadow,
        inputs: list[Any],
        index: int | None = None,
        *,
        fixed: Collection[Ref] | None = (),
    ) -> None:
        super().__init__(shadow, fixed=fixed)
        self._index = index
        self.aliases = Aliases()
        weights = [tensor for module in shadow.module.modules() for _, tensor in tensors_of(module)]
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        self._protected = {address(tensor) for tensor in (*tensors, *weights)} - {0}
        refs = [self._new() for _ in inputs]  # before the records of their sizes
        self.inputs = [self._input(*pair) for pair in zip(refs, inputs, strict=True)]

    @contextmanager
    def recording(self, opened: tuple[type[nn.Module], ...] = ()) -> Iterator[None]:
        """Record calls inside the context, for the call of the shadow.

        Args:
            opened: classes of fused modules whose own forward is recorded instead of one step.
        """
        for module in self.shadow.module.modules():
            if module is not self.shadow.module and is_package_module(module):
                is_opened = isinstance(module, opened)
                original: Any = getattr(module, "_original_class", None)
                forward = original.forward.__get__(module) if is_opened else self._leaf(module)
                vars(module)["forward"] = forward
        try:
            with within(RECORDER, self.called), AroundFunctions(self._asked):
                yield
        finally:
            self._depth = 1  # escaped sizes are plain ints from now on
            for module in self.shadow.module.modules():
                vars(module).pop("forward", None)

    def called(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaf: Any = None,
        *,
        effect: bool = False,
    ) -> Any:
        """Record a call of this package as one step, and return its output.

        Args:
            leaf: (the called function, the module) if `function` is the forward of a module's shadow.
            effect: whether it changes a cache; a module that gets one does.
        """
        if self._depth:
            return function(*args, **kwargs)
        self._depth += 1
        try:
            output = function(*plain(args), **plain(kwargs))
            if function in _HANDED_OUT:
                self._protected.update(map(address, tensors_in(output)))
        finally:
            self._depth -= 1
        with ours():
            called, module = leaf or (function, None)
            effect = effect or (leaf is not None and _holds_stand_in((args, kwargs)))
            step = self._step(called, self.refs(args), self.refs(kwargs), effect=effect, leaf=module)
            self._keep(output, step)
            return output

    def _asked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._depth:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") != "__get__":
            with ours():
                self._check(args, kwargs)
        self._depth += 1
        try:
            versions = [(t, t._version) for t in tensors_in((args, kwargs)) if not t.is_inference()]
            output = func(*plain(args), **plain(kwargs))
            written = [t for t, version in versions if t._version != version]
            given = list(tensors_in((args, kwargs)))
            if not written:
                output = _known_apart(output, set(map(id, given)))
        finally:
            self._depth -= 1
        with ours():
            if any(address(t) in self._protected for t in written):
                raise Refused(Refusal("it writes to its arguments or its weights"))
            if (
                func in MAY_COPY and args and address(args[0]) in self._protected
            ):  # in another call it may be no copy
                self._protected.add(address(output))
            before = [(tensor, self._refs.get(id(tensor))) for tensor in given]
            told = self._record_output(func, args, kwargs, output, bool(written))
            self._note_memory(before, written, output, may_copy=func in MAY_COPY or "memory_format" in kwargs)
            return told

    def _note_memory(
        self, given: list[tuple[Tensor, Ref | None]], written: list[Tensor], output: Any, *, may_copy: bool
    ) -> None:
        """Record the tensors that a call has written to, and the memory that its output shares.

        Args:
            given: its tensors, with their earlier refs.
        """
        number = len(self.steps)
        if written:
            targets = set(map(id, written))
            self.aliases.written(
                number, {ref for tensor, ref in given if ref is not None and id(tensor) in targets}
            )
        for made in tensors_in(output):
            result = self._refs.get(id(made))
            for place, (tensor, ref) in enumerate(given):
                maybe = may_copy and place == 0
                if (
                    result is not None
                    and ref is not None
                    and (maybe or 0 != address(made) == address(tensor))
                ):
                    self.aliases.view(number, ref, result, may_copy=maybe)

    def _check(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Check the arguments of a call.

        Raises:
            Refused: it has a tensor from elsewhere, or a random generator.
        """
        for tensor in tensors_in((args, kwargs)):
            self._ref(tensor)
        if kwargs.get("generator") is not None:
            raise Refused(Refusal("it draws random numbers"))

    def _record_output(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any, writes: bool) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if isinstance(output, torch.Size) and name in ("size", "shape"):
            owner = self._ref(args[0])
            kind = torch.Size if self._fixed is None else Sizes
            return kind(
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
        if isinstance(output, bool | int) and name in FORM:
            return output
        if output is None and not writes and name != "__set__":
            return output
        if next(tensors_in(output), None) is None and holds_constants_only((args, kwargs)):
            return output  # for example of objects that are destroyed meanwhile
        if name == "__set__" or (output is not None and next(tensors_in(output), None) is None):
            raise Refused(Refusal(f"its control flow depends on tensor values ({name})"))
        if func is Tensor.type_as:  # which reads the other only for its dtype
            func, args = Tensor.to, (args[0], output.dtype)
        result = self._step(func, self.refs(args), self.refs(kwargs), effect=writes)
        if name in SQUEEZES:  # in another call, another dimension may be one
            self._expect(self._step(Tensor.dim, (result,), {}), output.dim())
        if type(output) in (tuple, list):
            self._expect_length(result, output)  # that of a split follows from sizes
        self._keep(output, result)
        return output

    def _input(self, ref: Ref, value: Any) -> Any:
        if type(value) is int:
            return self._size(ref, value)
        if not isinstance(value, Tensor):
            made = self._stand_in(value)
            self._refs[id(made)] = ref
            self._alive.append(made)
            return made
        self._keep(value, ref)
        return value

    def _stand_in(self, value: Any) -> StandIn:
        if is_shared(value):
            return SharedStandIn(value, self)
        assert self._index is not None
        return CacheStandIn(value, self._index, self)

    def _leaf(self, module: nn.Module) -> Any:
        """Return the replacement of a shadow's forward during the recording."""
        forward = type(module).forward.__get__(module)
        original = self.shadow.original(module)
        # A module with hooks is called as a module; calling the forward of others saves a Python call.
        called = original if isinstance(original, FusedModuleMixin) else original.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            return self.called(forward, args, kwargs, leaf=(called, original))

        return noted


def _known_apart(output: Any, given: set[int]) -> Any:
    """Return `output` with views in place of tensors that are arguments themselves: in another call they may differ."""
    if isinstance(output, Tensor):
        return output.view_as(output) if id(output) in given else output
    if type(output) in (tuple, list) and not given.isdisjoint(map(id, tensors_in(output))):
        return type(output)([_known_apart(part, given) for part in output])
    return output


def _holds_stand_in(value: Any) -> bool:
    if isinstance(value, tuple | list | dict):
        return any(map(_holds_stand_in, value.values() if isinstance(value, dict) else value))
    return issubclass(type(value), StandIn)
