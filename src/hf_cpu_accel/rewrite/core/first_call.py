"""Compare the first real call of each fused part with its own forward, over the same packed weights.

A part is matched from a trace and verified on random inputs when a model is accelerated. A caller may pass other inputs, so the
two are compared once on real ones. If they differ by more than the published bound of the dtype, this part alone goes back to
its own forward, with a warning and a row in `explain()`. From the second call on the check is gone.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_cpu_accel.check import compare, is_rounding
from hf_cpu_accel.guard.modules import instance_forward
from hf_cpu_accel.hosts.output_capturing import is_collecting_inside
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.ops.derivatives import in_transform
from hf_cpu_accel.packing.linear import QUANTIZED
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference
from hf_cpu_accel.patching.hooks import PackageHook
from hf_cpu_accel.patching.restore import Journal
from hf_cpu_accel.plan import Plan, PlanItem
from hf_cpu_accel.rewrite.core.cache_state import Snapshot, put_back, snapshot
from hf_cpu_accel.rewrite.core.dtype_table import coarsest
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.grouping import disable_grouping
from hf_cpu_accel.rewrite.core.packed_module import PackedModule
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.runtime.fork import new_lock
from hf_cpu_accel.runtime.tracing import is_tracing
from hf_cpu_accel.tolerance import FEW_ROWS, PACKED

LEFT = "_hf_cpu_accel_left"  # attribute with the reason of a part that runs its own forward again


class _Call(threading.local):
    """State of the comparison in this thread."""

    def __init__(self) -> None:
        self.is_reference = False
        self.expected: dict[int, tuple[Any, Reference, list[Snapshot]]] = {}


_call = _Call()
_removing = new_lock()


class FirstCall(PackageHook):
    """The hooks around the first call of a fused part.

    Args:
        module: the part.
        path: in the model.
        dtype: of its packed weights, the coarsest.
    """

    def __init__(self, module: FusedModuleMixin, path: str, dtype: str) -> None:
        self.module, self.path, self.dtype = module, path, dtype
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Register the hooks; `undo` removes them."""
        self._handles.append(self.module.register_forward_pre_hook(self.before, with_kwargs=True))
        self._handles.append(self.module.register_forward_hook(self.after, with_kwargs=True))

    def undo(self) -> None:
        with _removing:  # two threads may be the first
            for handle in self._handles:
                handle.remove()

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Run the own forward of the part.

        Called without the keywords, there is nothing to do: another thread compared its call and removed this hook after torch
        had found it.
        """
        if is_tracing() or in_transform():
            return
        _call.expected.pop(id(self), None)  # of a call that was interrupted
        if kwargs is None or not is_comparable(module):
            return
        reference = module.reference_call(args, kwargs)
        if reference is None:
            return
        # Copies, since a forward may write to its arguments.
        own = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in reference.args)
        with torch.no_grad(), _as_reference():
            expected = module._original_class.forward(module, *own, **reference.kwargs)
        before = [snapshot(cache, index, by_kernels=True) for cache, index in reference.caches]
        _call.expected[id(self)] = expected, reference, before

    def after(self, module: Any, args: tuple[Any, ...], *rest: Any) -> Any:
        """Compare the outputs, and return the output of the own forward if they differ.

        Args:
            rest: the keywords and the output; the latter alone as in `before`.
        """
        if torch.compiler.is_compiling():
            return None
        expected, reference, before = _call.expected.pop(id(self), (None, None, []))
        if reference is None or len(rest) != 2:
            return None
        kwargs, output = rest
        self.undo()
        difference = self._difference(first_output(output), first_output(expected), reference)
        if difference is None or isinstance(getattr(module, LEFT, None), str):
            return None
        reason = f"its first call was {difference}: its original forward runs"
        vars(module)[LEFT] = reason
        warnings.warn(f"{self.path}, fused by hf_cpu_accel: {reason}", RuntimeWarning, stacklevel=2)
        for states in before:
            put_back(states)
        module.__class__ = module._original_class
        return type(module).forward(module, *args, **kwargs)

    def _difference(self, ours: Tensor | None, theirs: Tensor | None, reference: Reference) -> str | None:
        """Return a description of the difference, or None if the outputs agree."""
        if theirs is None or not theirs.is_floating_point():
            return None
        dim = 1 if theirs.dim() == 4 else -1  # images: a row is a pixel
        comparison = compare(ours, theirs, dim=dim, rows=reference.tokens)
        if comparison.mismatch is not None:
            return comparison.mismatch
        allowed = max(PACKED.of(dtype, theirs.dtype) for dtype in (self.dtype, reference.dtype or self.dtype))
        few = math.inf if reference.moves_rows else FEW_ROWS if self.dtype in QUANTIZED else 1.0
        if comparison.within(allowed, few=few) or not theirs.isfinite().all():
            return None
        repeatable = theirs.dtype is torch.bfloat16 and reference.is_repeatable
        if repeatable and self._is_rounding(ours, theirs, reference, dim):
            return None
        return f"off by {comparison.text(allowed)}"

    def _is_rounding(self, ours: Tensor | None, theirs: Tensor, reference: Reference, dim: int) -> bool:
        """Return whether the fused output is no farther from the own forward in float32 than the own forward in bfloat16 is."""
        own: Any = self.module._original_class.forward
        with torch.no_grad(), _as_reference():
            given = call_foreign(own, self.module, *_widened(reference.args), **_widened(reference.kwargs))
        exact = None if isinstance(given, Refusal) else first_output(given)
        return is_rounding(ours, theirs, exact, dim=dim, rows=reference.tokens)


def _widened(value: Any) -> Any:
    """Return an argument with float32 tensors in place of bfloat16 ones."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype is torch.bfloat16 else value
    if isinstance(value, tuple | list):
        parts = [_widened(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, MutableMapping):
        return {name: _widened(part) for name, part in value.items()}
    return value


def is_comparable(module: FusedModuleMixin) -> bool:
    """Return whether a call of `module` now runs the fused part alone."""
    if _call.is_reference or is_collecting_inside() or module.is_watched:
        return False
    return instance_forward(module) is None


def fused_parts(root: nn.Module) -> Iterator[tuple[str, FusedModuleMixin]]:
    """Yield (path, part) of the fused parts that can be compared with their own forward; of nested parts, only the outer one."""
    inside: set[int] = set()
    for path, module in root.named_modules():
        if id(module) in inside or not isinstance(module, FusedModuleMixin):
            continue
        if type(module).reference_call is not FusedModuleMixin.reference_call:
            inside.update(id(part) for part in module.modules())
            yield path, module


def check_first_calls(root: nn.Module, journal: Journal) -> None:
    """Compare the first call of each fused part of an accelerated model."""
    for path, module in fused_parts(root):
        first = FirstCall(module, path, _coarsest(module))
        journal.record(first)
        first.start()


def with_first_calls(plan: Plan, root: nn.Module) -> Plan:
    """Return `plan` with the parts that went back to their own forward."""
    reasons = {path: vars(module).get(LEFT) for path, module in root.named_modules()}
    items = []
    for item in plan.items:
        reason = reasons.get(item.name)
        is_part = reason is not None and item.reason is None and item.packed_bytes == 0
        items.append(PlanItem.left(item.name, item.structure, reason) if is_part and reason else item)
    named = {item.name for item in items}
    items += [PlanItem.left(path, "fused part", r) for path, r in reasons.items() if r and path not in named]
    return replace(plan, items=tuple(items))


@contextmanager
def _as_reference() -> Iterator[None]:
    try:
        _call.is_reference = True
        with disable_grouping():
            yield
    finally:
        _call.is_reference = False


def _coarsest(module: nn.Module) -> str:
    return coarsest(part.packed_dtype for part in module.modules() if isinstance(part, PackedModule))


def first_output(output: Any) -> Tensor | None:
    """Return the hidden states among the outputs of a part, or None."""
    while isinstance(output, tuple | list) and output:
        output = output[0]
    if isinstance(output, LazyTensor):
        output = output.tensor
    return output if isinstance(output, Tensor) else None
