"""A cache of values computed from tensors, valid while the tensors are unchanged.

Models pass the same mask to each of their layers, and the same graph to each layer and epoch. Values derived from them are computed
once.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

from hf_cpu_accel.ops.derivatives import in_transform
from hf_cpu_accel.ops.values import sampled

T = TypeVar("T")

# Tensors without a version are compared with a copy up to this many bytes; larger ones are never recognized.
MOST_COPIED = 16 << 20
_MOST_REMEMBERED = 256
_SAMPLED = 128  # values


class Stamp:
    """Recognizes one tensor: the same object, on the same storage, with the same shape, strides and values.

    torch counts the writes to a tensor as its version. Tensors of `torch.inference_mode` have none, so their values are compared
    with a copy.

    Args:
        by_value: compare the values of any tensor with a copy, which also notices writes that bypass torch (`.data`, numpy). For
            small tensors.
        by_sample: compare 128 values of the tensor and its version, in 2 us for any size. This also notices writes to the whole
            tensor that bypass torch.
    """

    __slots__ = ("_copy", "_layout", "_reference", "_sample", "_version")

    def __init__(
        self,
        tensor: Tensor,
        *,
        by_value: bool = False,
        by_sample: bool = False,
        forget: Callable[[], object] | None = None,
    ) -> None:
        """Stamp the tensor; `forget` is called when the tensor is deleted."""
        self._reference = weakref.ref(tensor, None if forget is None else lambda _: forget())
        self._layout = _layout(tensor)
        self._version = None if tensor.is_inference() else tensor._version
        compared = (by_value or self._version is None) and tensor.nbytes <= MOST_COPIED
        self._copy = tensor.detach().clone() if compared else None
        # A view of the tensor's memory, and its values.
        view = sampled(tensor, tensor.numel() // _SAMPLED) if by_sample and not compared else None
        self._sample = None if view is None else (view, view.clone())

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is the stamped tensor, unchanged."""
        if self._reference() is not tensor or _layout(tensor) != self._layout:
            return False
        if self._copy is not None:
            return torch.equal(tensor, self._copy)
        if self._sample is not None and not torch.equal(*self._sample):
            return False
        return self._version is not None and tensor._version == self._version


class Memo:
    """A cache of results by their source tensors, referenced weakly: a result is dropped with its tensor.

    It has at most `most` results, the last ones used, so a result that references its own tensor does not stay forever.
    """

    def __init__(self, most: int = _MOST_REMEMBERED) -> None:
        self._most = most
        # Without a lock: each change is one atomic call, and the garbage collector may make a change during any other.
        self._entries: OrderedDict[tuple[int, Hashable], tuple[list[Stamp | None], object]] = OrderedDict()

    def get(
        self,
        tensor: Tensor,
        key: Hashable,
        make: Callable[[], T],
        *,
        also: Sequence[Tensor | None] = (),
        by_value: bool = False,
        by_sample: bool = False,
    ) -> T:
        """Return the cached result for the key and the tensors, or `make()`.

        Nothing is cached while a graph is traced, and under transforms of `torch.func`.

        Args:
            tensor: the tensor that the result depends on.
            key: the kind of result, and other values that it depends on.
            make: computes the result.
            also: other tensors that the result depends on.
            by_value, by_sample: see `Stamp`.
        """
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return make()
        place, tensors = (id(tensor), key), (tensor, *also)
        entry = self._entries.get(place)
        if entry is not None and all(map(_holds, entry[0], tensors)):
            with suppress(KeyError):  # another thread may have removed it
                self._entries.move_to_end(place)
            return entry[1]  # type: ignore[return-value]
        if in_transform():  # its tensors end with it
            return make()
        # Stamped before `make()`: after a concurrent write the result is not found, instead of wrong.
        stamps = [
            None
            if part is None
            else Stamp(part, by_value=by_value, by_sample=by_sample, forget=self._forgetting(place))
            for part in tensors
        ]
        result = outside_inference_mode(make)
        self._entries[place] = stamps, result
        with suppress(KeyError):
            while len(self._entries) > self._most:
                self._entries.popitem(last=False)
        return result

    def clear(self) -> None:
        """Remove all results."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def _forgetting(self, place: tuple[int, Hashable]) -> Callable[[], object]:
        return lambda: self._entries.pop(place, None)


def outside_inference_mode(make: Callable[[], T]) -> T:
    """Return `make()`; autograd can record its tensors in later calls, even if this one runs under `torch.inference_mode`."""
    if not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(False), torch.no_grad():
        return make()


def _holds(stamp: Stamp | None, tensor: Tensor | None) -> bool:
    return tensor is None if stamp is None else tensor is not None and stamp.holds(tensor)


def _layout(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


remember = Memo().get
"""The cache of values that layers derive from masks and biases."""
