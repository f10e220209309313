"""Measure each kind of fused part against its own forward, once per size of call, over the same packed weights.

Fused parts save calls and memory traffic, so they are nearly always faster. Where a kernel is slower on a CPU, the part runs its
own forward for calls of that size, and `explain()` reports it. This takes no second copy of the weights.

The first call of a size is not measured, so a single call costs nothing. Later calls share the time budget of all measurements
(`providers/budget.py`). After all measurements a call of the model costs one look-up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference
from hf_cpu_accel.patching.hooks import PackageHook
from hf_cpu_accel.patching.restore import Journal
from hf_cpu_accel.plan import Plan
from hf_cpu_accel.providers import choice as choices
from hf_cpu_accel.providers.choice import Contest
from hf_cpu_accel.rewrite.core.first_call import first_output, fused_parts, is_comparable
from hf_cpu_accel.rewrite.core.layer_stacks import stack_of
from hf_cpu_accel.rewrite.core.packed_module import PackedModule
from hf_cpu_accel.runtime.fork import new_lock
from hf_cpu_accel.runtime.tracing import is_tracing

UNFUSED = "unfused"
# Calls of one size to wait for a part: after these it counts as not called, or not fused.
_MOST_TRIES = 8

_Size = tuple[Any, ...]
_installing, _removing = new_lock(), new_lock()
_classes: dict[type[nn.Module], type[nn.Module]] = {}


def size_of(tensors: Iterable[Any]) -> _Size | None:
    """Return (dtype, threads, *sizes) of the first tensor, or None without one. Each size is the logarithm of the next power of
    two."""
    tensor = next((value for value in tensors if isinstance(value, Tensor)), None)
    if tensor is None:
        return None
    return tensor.dtype, torch.get_num_threads(), *((size - 1).bit_length() for size in tensor.shape)


class Autotune(PackageHook):
    """Measure the parts below a module on its calls.

    Args:
        stack: the module.
        parts: the fused parts that it calls.
    """

    def __init__(self, stack: nn.Module, parts: Iterable[FusedModuleMixin]) -> None:
        self._stack = stack
        self._kinds: dict[str, list[FusedModuleMixin]] = {}
        for part in parts:
            self._kinds.setdefault(_kind(part), []).append(part)
        self._tries: dict[_Size, int] = {}
        self._waiting: list[_Measurement] = []
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        self._handle = self._stack.register_forward_pre_hook(self, with_kwargs=True)

    def undo(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._stop_waiting()

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        if kwargs is None or is_tracing():
            return  # without the keywords: the hook was removed after torch had found it
        size = size_of((*args, *kwargs.values()))
        tries = self._tries.get(size, 0) if size is not None else _MOST_TRIES
        if size is None or tries >= _MOST_TRIES or (tries and not choices.chooser().can_measure()):
            return
        if not _installing.acquire(blocking=False):
            return
        try:
            self._tries[size] = tries + 1
            self._stop_waiting()
            if 0 < tries < _MOST_TRIES - 1:
                self._waiting = [_Measurement(kind, parts) for kind, parts in self._kinds.items()]
        finally:
            _installing.release()

    def _stop_waiting(self) -> None:
        while self._waiting:
            self._waiting.pop().remove()


class _Measurement(PackageHook):
    """Wait for the next call of the first of `parts`, which are all of one kind, and measure it."""

    def __init__(self, kind: str, parts: list[FusedModuleMixin]) -> None:
        self._kind, self._parts = kind, parts
        self._handle = parts[0].register_forward_pre_hook(self, with_kwargs=True)

    def remove(self) -> None:
        with _removing:  # two threads may have been called at the same time
            self._handle.remove()

    def __call__(
        self, module: FusedModuleMixin, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        self.remove()
        # Another thread has removed the hook after torch had found it, or the part runs its own forward again.
        if kwargs is None or not isinstance(module, FusedModuleMixin):
            return
        reference = module.reference_call(args, kwargs) if is_comparable(module) else None
        size = None if reference is None else size_of((*reference.args, *reference.kwargs.values()))
        if reference is None or size is None or not reference.is_repeatable:
            return
        dtype, _, *sizes = size
        rows = 1 << sum(sizes[:-1])
        name = (
            f"{self._kind} {str(dtype).removeprefix('torch.')} size<={'x'.join(str(1 << n) for n in sizes)}"
        )
        choice = choices.chooser().decide(name, rows, partial(_contest, module, reference))
        if choice is not None and choice.provider == UNFUSED:
            for part in self._parts:
                leave_unfused(part, size)


def leave_unfused(part: FusedModuleMixin, size: _Size) -> None:
    """Make `part` run its own forward for calls of that size."""
    vars(part).setdefault("_unfused_sizes", set()).add(size)
    part.__class__ = _choosing_class(type(part))  # type: ignore[assignment]


def autotune(root: nn.Module, journal: Journal) -> None:
    """Measure the fused parts of an accelerated model in its calls."""
    stacks: dict[str, list[FusedModuleMixin]] = {}
    for path, part in fused_parts(root):
        stacks.setdefault(stack_of(path, root), []).append(part)
    for path, parts in stacks.items():
        tuned = Autotune(root.get_submodule(path), parts)
        journal.record(tuned)
        tuned.start()


def with_unfused(plan: Plan, root: nn.Module) -> Plan:
    """Return `plan` with the sizes of calls for which fused parts are slower than their own forward."""
    sizes = {path: vars(module).get("_unfused_sizes", ()) for path, module in root.named_modules()}
    items = []
    for item in plan.items:
        slower = sorted("x".join(str(1 << n) for n in size[2:]) for size in sizes.get(item.name, ()))
        is_part = slower and item.reason is None and item.packed_bytes == 0
        items.append(replace(item, provider=f"{UNFUSED}: up to {', '.join(slower)}") if is_part else item)
    return replace(plan, items=tuple(items))


def _contest(part: FusedModuleMixin, reference: Reference) -> Contest:
    # A forward may write to its arguments.
    args = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in reference.args)

    def run(forward: Any) -> object:
        return first_output(forward(part, *args, **reference.kwargs))

    fused, own = part._fused_class.forward, part._original_class.forward
    return Contest(partial(run, fused), {UNFUSED: lambda: partial(run, own)})


def _kind(part: FusedModuleMixin) -> str:
    """Return a key of `part`; parts with equal keys take the same time."""
    weights = [module for module in part.modules() if isinstance(module, PackedModule)]
    shapes = ",".join(f"{module.packed_dtype}{'x'.join(map(str, module.weight_shape))}" for module in weights)
    return f"{part._fused_class.__name__} {part._original_class.__qualname__} {shapes}"


def _choosing_class(fused: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `fused` that checks the size of each call."""
    if "_looks_at_sizes" in vars(fused):
        return fused
    known = _classes.get(fused)
    if known is None:
        made = type(fused.__name__, (fused,), {"_looks_at_sizes": True, "__module__": fused.__module__})
        made.forward = _forward_by_size  # type: ignore[attr-defined]  # as in mixed_class
        known = _classes.setdefault(fused, made)
    return known


def _forward_by_size(self: Any, *args: Any, **kwargs: Any) -> Any:
    is_slower = size_of((*args, *kwargs.values())) in self._unfused_sizes
    serving = self._original_class if is_slower else self._fused_class
    return serving.forward(self, *args, **kwargs)
