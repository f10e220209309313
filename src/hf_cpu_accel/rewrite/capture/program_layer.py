"""The forward of layers of unknown form: one program for each form of call, recorded in the first one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_cpu_accel.guard.guard import Guard
from hf_cpu_accel.lazy.lazy_tensor import all_made
from hf_cpu_accel.ops.derivatives import in_transform
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference
from hf_cpu_accel.rewrite.capture.call import Call
from hf_cpu_accel.rewrite.capture.program import Mismatch, Program
from hf_cpu_accel.rewrite.capture.record import alike, record
from hf_cpu_accel.rewrite.core.cache_state import put_back
from hf_cpu_accel.rewrite.core.first_call import LEFT
from hf_cpu_accel.rewrite.core.foreign_code import attempt
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.runtime.tracing import is_tracing

_MOST_FORMS = 8
_MOST_SIZES = 256
_FEW_SIZES = 16
_MOST_CHANGES = 4
_MOST_LEFT = 16


@dataclass
class _SizedProgram:
    """A program, and the sizes for which it is valid.

    Attributes:
        compared: the sizes at which it was compared.
        sizes: these, and more that differ from the first only where others did.
        varied: the numbers in `sizes` that differed in a compared call; see `changed`.
        unfit: sizes at which another branch was taken, or the output was wrong.
    """

    program: Program
    guard: Guard
    first: tuple[int, ...]
    compared: set[tuple[int, ...]] = field(default_factory=set)
    sizes: set[tuple[int, ...]] = field(default_factory=set)
    varied: frozenset[tuple[int, int]] = frozenset()
    unfit: set[tuple[int, ...]] = field(default_factory=set)
    is_pinned: bool = False

    def knows(self, sizes: tuple[int, ...]) -> bool:
        if sizes in self.sizes or sizes in self.compared:
            return True
        known = not self.is_pinned and sizes not in self.unfit and self.changed(sizes) <= self.varied
        if known and len(self.sizes) < _MOST_SIZES:
            self.sizes.add(sizes)
        return known

    def fails(self, sizes: tuple[int, ...]) -> None:
        """Record that the program failed at these sizes. After more failures than valid sizes it is not tried at new ones: each
        token is a new one."""
        self.sizes.discard(sizes)
        self.compared.discard(sizes)
        self.unfit.add(sizes)
        self.is_pinned |= len(self.unfit) >= max(_FEW_SIZES, len(self.sizes))

    def is_right(self, sizes: tuple[int, ...]) -> None:
        self.compared.add(sizes)
        self.varied |= self.changed(sizes)

    def is_wrong(self) -> None:
        """Limit the program to the sizes at which it was compared."""
        self.sizes, self.is_pinned = set(), True

    def changed(self, sizes: tuple[int, ...]) -> frozenset[tuple[int, int]]:
        """Return the sizes that differ from the first call, each with 0, 1 or 2 for more: a size of 1 broadcasts."""
        pairs = enumerate(zip(sizes, self.first, strict=True))
        return frozenset((n, min(size, 2)) for n, (size, first) in pairs if size != first)


class ProgramLayer(FusedModuleMixin):
    """Mixed into the layer's own class, whose forward runs where hooks read values inside, while a graph is traced, and for
    forms of calls that cannot be recorded."""

    _guards_attributes: ClassVar[bool] = False  # a program is recorded again after changes

    _programs: dict[Any, _SizedProgram | None]
    _index: int | None = None  # of its part of a cache
    _changes: int = 0
    _left: int = 0  # calls of forms that cannot be recorded, while none is

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the original forward returns."""
        call = self._call(args, kwargs)
        if call is None:
            return self._original_class.forward(self, *args, **kwargs)
        recorded = self._program(call.form)
        if recorded is None:
            return self._first(call, args, kwargs)
        for tensor in call.tensors:
            check_inference(self, tensor)
        if not recorded.knows(call.sizes):
            return self._compare(recorded, call, args, kwargs)
        before = call.snapshots
        try:
            return recorded.program(call.inputs)
        except (
            Exception
        ) as error:  # the forward handles the call, or raises its own error: only caches were written
            if recorded.program.writes_over and not isinstance(error, Mismatch):
                raise
            recorded.fails(call.sizes)
            for caches in before:
                put_back(caches)
        return self._original_class.forward(self, *args, **kwargs)

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        call = self._call(args, kwargs)
        if call is None or self._programs.get(call.form) is None:
            return None
        beside = call.arguments(call.inputs_beside())
        return Reference(*beside, caches=call.caches, is_repeatable=not call.caches)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        if self._left >= _MOST_LEFT or self.is_watched_within or is_tracing():
            return None
        if torch.is_autocast_enabled("cpu"):
            return None
        call = Call.of(args, kwargs, self._index)
        if isinstance(call, Refusal):
            self._refused(call)
            self._left += not any(self._programs.values())
            return None
        return call

    def _program(self, form: Any) -> _SizedProgram | None:
        """Return the program for a form, or None if attributes have changed since; it is then recorded again."""
        recorded = self._programs.get(form)
        if recorded is None or not recorded.guard.has_changed():
            return recorded
        self._changes += 1
        self._programs.pop(form, None)
        if self._changes >= _MOST_CHANGES:
            self._programs[form] = None
            self._refused(Refusal("its attributes change between calls"))
        return None

    def _first(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of the forward; a program of it is kept if it agrees."""
        if in_transform():
            return self._original_class.forward(self, *args, **kwargs)
        is_new = call.form not in self._programs and len(self._programs) < _MOST_FORMS
        if not is_new:
            self._left += not any(self._programs.values())
            return self._original_class.forward(self, *args, **kwargs)
        found = attempt("", record, self, call)
        ours = None if isinstance(found, Refusal) else all_made(found[2])  # before the cache is written to
        expected = self._original_class.forward(self, *args, **kwargs)
        given = call.snapshot_outputs(expected, call.inputs)
        if not isinstance(found, Refusal) and not alike(self, ours, given):
            found = Refusal("replaying its recorded operations gives a different result")
        if isinstance(found, Refusal):
            self._programs[call.form] = None
            self._refused(found)
        else:
            self._programs[call.form] = _SizedProgram(*found[:2], call.sizes, {call.sizes})
            vars(self).pop(LEFT, None)
        return expected

    def _refused(self, refusal: Refusal) -> None:
        """Store the reason that `explain` prints until another form is recorded."""
        if not any(self._programs.values()):
            vars(self)[LEFT] = refusal.reason

    def _compare(
        self, recorded: _SizedProgram, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the first call at a new size, and compare."""
        if recorded.is_pinned or call.sizes in recorded.unfit:
            return self._original_class.forward(self, *args, **kwargs)
        inputs = call.inputs_beside()
        try:
            # First, since copies of caches may share written storage.
            output = all_made(call.snapshot_outputs(recorded.program(inputs), inputs))
        except Exception:  # as in `forward`; only a copy of the cache was written to
            recorded.fails(call.sizes)
            return self._original_class.forward(self, *args, **kwargs)
        expected = self._original_class.forward(self, *args, **kwargs)
        if alike(self, output, call.snapshot_outputs(expected, call.inputs)):
            recorded.is_right(call.sizes)
        else:
            recorded.is_wrong()
        return expected

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ProgramLayer:
        super()._apply(fn, recurse)
        self._programs, self._left, self._changes = {}, 0, 0
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_programs": {}, "_left": 0, "_changes": 0}
