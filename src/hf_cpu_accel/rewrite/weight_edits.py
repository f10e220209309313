"""Detect writes to parameters of an accelerated model. Values derived from them are computed again, or the call raises.

Kernels read most biases and gains in place. Fused layers also hold values made of several of them (the biases of query, key and
value side by side), and convolutions have their norms folded in. A version counter misses some writes (`.data`, numpy), so the
few thousand copied values are compared with their earlier state, once per call of the layers that read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import getitem, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_cpu_accel.guard.values import KeptValues, sampled
from hf_cpu_accel.patching.accelerated_module import AcceleratedModule
from hf_cpu_accel.patching.hooks import PackageHook
from hf_cpu_accel.patching.restore import Journal
from hf_cpu_accel.rewrite.core.layer_stacks import stack_of
from hf_cpu_accel.runtime.fork import new_lock
from hf_cpu_accel.runtime.tracing import is_tracing

# Larger ones (weights that are kept beside their packed form) are compared by version, and by so many of their values.
_MOST_VALUES, _SAMPLED = 1 << 16, 256
_taking_in = new_lock()  # one lock for all watches: they are copied and pickled with their models


@dataclass(frozen=True)
class Slot:
    """A parameter or buffer, by the dictionary that holds it, its name there and its path in the model.

    Attributes:
        is_copied: whether values were derived from it. If not, it is read in place, and only replacing it must be noticed.
        is_packed: whether packed weights were made from it, which cannot be packed again.
    """

    holder: dict[str, Tensor | None]
    name: str
    path: str
    is_copied: bool
    is_packed: bool

    @property
    def tensor(self) -> Tensor:
        """Return the current tensor.

        Raises:
            RuntimeError: it was removed.
        """
        tensor = self.holder.get(self.name)
        if tensor is None:
            raise RuntimeError(
                f"{self.path} was removed after acceleration, but packed values were made from it: call "
                "hf_cpu_accel.restore, remove it, and accelerate again"
            )
        return tensor


class EditWatch(PackageHook):
    """Forward pre-hook that checks the parameters from which values inside a module were derived."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self._holders, self._names = [slot.holder for slot in slots], [slot.name for slot in slots]
        self._seen = _Seen.of(slots)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Check the parameters, and derive the values again if some changed.

        Raises:
            RuntimeError: a parameter with packed weights was modified, or one was removed.
        """
        if is_tracing() or self._is_unchanged():
            return
        with _taking_in:
            if not self._is_unchanged():  # else another thread has taken it in meanwhile
                self._take_in(module)

    def _take_in(self, module: nn.Module) -> None:
        for number, slot in enumerate(self._slots):
            if slot.is_packed and not self._seen.has(number, slot.tensor):
                raise RuntimeError(
                    f"{slot.path} was modified after acceleration, but packed weights were made from it: call "
                    "hf_cpu_accel.restore, modify it, and accelerate again"
                )
        seen = _Seen.of(self._slots)  # before: the next call detects a concurrent write
        module._apply(_identity)
        self._seen = seen

    def _is_unchanged(self) -> bool:
        try:
            return self._seen.is_state_of(map(getitem, self._holders, self._names))
        except KeyError:
            return False


class _Seen:
    """The state of parameters when values were derived from them. Immutable, since several threads may read it.

    Attributes:
        numbers, values: by dtype, since only tensors of one dtype can be compared in one op; copied values of tensors by number.
    """

    def __init__(self, tensors: list[Tensor], numbers: list[list[int]]) -> None:
        self.tensors, self.numbers = tensors, numbers
        self.large = [tensor for tensor in tensors if tensor.numel() > _MOST_VALUES]
        self.state = self._state_of_large()
        self.values = [KeptValues([_compared(tensors[number]) for number in some]) for some in numbers]

    @classmethod
    def of(cls, slots: list[Slot]) -> _Seen:
        tensors = [slot.tensor for slot in slots]
        small: dict[torch.dtype, list[int]] = {}
        for number, (slot, tensor) in enumerate(zip(slots, tensors, strict=True)):
            if slot.is_copied:
                small.setdefault(tensor.dtype, []).append(number)
        return cls(tensors, list(small.values()))

    def is_state_of(self, tensors: Iterable[Tensor | None]) -> bool:
        """Return whether the parameters are now `tensors`, with the same values."""
        return (
            all(map(is_, tensors, self.tensors))
            and (not self.large or self.state == self._state_of_large())
            and all(values.are_held() for values in self.values)
        )

    def has(self, number: int, tensor: Tensor) -> bool:
        """Return whether `tensor`, one of the parameters, is unchanged."""
        for numbers, kept in zip(self.numbers, self.values, strict=True):
            if number in numbers:
                start = sum(_compared(self.tensors[n]).numel() for n in numbers[: numbers.index(number)])
                present = _compared(tensor).reshape(-1)
                before = kept.values[start : start + len(present)]
                # `model.to(dtype)` casts what is kept along with the rest.
                is_cast = present.dtype is not before.dtype
                if not torch.equal(present, before.to(present.dtype)):
                    return False
                return is_cast or not self._is_another_large(tensor)
        return True

    def _state_of_large(self) -> list[tuple[int, int]]:
        return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in self.large]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose large tensors lie in other memory."""
        vars(self).update(state)
        self.state = self._state_of_large()

    def _is_another_large(self, tensor: Tensor) -> bool:
        """Return whether a large tensor is no longer the same tensor, memory and version."""
        if tensor.numel() <= _MOST_VALUES:
            return False
        states = zip(self.large, self.state, self._state_of_large(), strict=True)
        return not any(large is tensor and now == then for large, then, now in states)


class WatchedModule:
    """A change in the journal: a module has an `EditWatch` before its forward."""

    def __init__(self, module: nn.Module, watch: EditWatch) -> None:
        self._module, self._watch = module, watch
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        self._handle = self._module.register_forward_pre_hook(self._watch)

    def undo(self) -> None:
        if self._handle is not None:
            self._handle.remove()


def watch_edits(root: nn.Module, journal: Journal) -> None:
    """Watch the parameters of an accelerated model for writes, one stack of layers after another."""
    stacks: dict[str, list[Slot]] = {}
    for path, slot in _slots(root, {}, False, ""):
        stacks.setdefault(stack_of(path, root), []).append(slot)
    for path, slots in stacks.items():
        if any(slot.is_copied for slot in slots):
            watched = WatchedModule(root.get_submodule(path), EditWatch(slots))
            journal.record(watched)
            watched.start()


def _slots(
    module: nn.Module, copied: dict[tuple[int, str], bool], is_read: bool, path: str
) -> Iterator[tuple[str, Slot]]:
    """Yield (path of the module, parameter or buffer) for all that accelerated modules read.

    Args:
        copied: {(id of the dictionary, name there): whether packed weights were made from it} of parameters and buffers from which
            the modules around derived values.
        is_read: whether one of these modules reads the others in place.
    """
    if isinstance(module, AcceleratedModule):
        is_read |= module.reads_parameters
        copied = dict(copied)
        for part in module.copied_parameters():
            key = id(part.holder), part.name
            copied[key] = part.is_packed or copied.get(key, False)
    holders: list[dict[str, Any]] = [module._parameters, module._buffers]
    for holder in holders:
        for name, tensor in holder.items():
            is_packed = copied.get((id(holder), name))
            if tensor is None or (is_packed is None and not (is_read and holder is module._parameters)):
                continue
            if holder is module._buffers and not tensor.is_floating_point():
                continue  # the batch count of a norm is read in training only
            whole = f"{path}.{name}" if path else name
            yield path, Slot(holder, name, whole, is_packed is not None, bool(is_packed))
    for name, child in module.named_children():
        yield from _slots(child, copied, is_read, f"{path}.{name}" if path else name)


def _compared(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that are compared: a sample of a large one, whose memory is tracked by its state."""
    if tensor.numel() <= _MOST_VALUES:
        return tensor
    return sampled(tensor, tensor.numel() // _SAMPLED)


def _identity(tensor: Tensor) -> Tensor:
    return tensor
