"""Recognize tensors that were not written to. Ops: keep_values, have_values, drop_values.

Versions count the writes of torch's ops. Writes through `.data` or numpy have no version, so values are compared, too. The library
stores pointers to hundreds of small tensors, because passing them to an op in each call takes longer than comparing them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.kept import Kept, can_keep

# Inference tensors have no version. They are compared with a copy up to this many bytes; larger ones are never recognized.
MOST_COPIED = 16 << 20
_SAMPLED = 128  # values


class KeptValues:
    """Tensors of one dtype, and a copy of their values. Copies and pickles have the same values.

    Attributes:
        tensors: of any shape, not copied: if the memory of one is replaced (`.data`), the new memory is compared.
        values: [total number of elements], one tensor after another.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        """
        Raises:
            ValueError: no tensors, or different dtypes.
        """
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            raise ValueError(f"tensors must have one dtype, got {sorted(map(str, dtypes))}")
        self._start(tensors, torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))

    def _start(self, tensors: list[Tensor], values: Tensor) -> None:
        self.tensors, self.values = tensors, values
        self._kept = Kept("values", tensors, values) if can_keep("values") else None

    def are_held(self) -> bool:
        """Return whether each tensor still has the same dtype and values, bit for bit."""
        return _have_values(self) if self._kept is None else _OPS.have_values(self._kept.number)

    def __getstate__(self) -> tuple[list[Tensor], Tensor]:
        return self.tensors, self.values

    def __setstate__(self, state: tuple[list[Tensor], Tensor]) -> None:
        self._start(*state)


class Fingerprint:
    """Several tensors, to recognize them with the same memory and values.

    All values of a small tensor are compared, and of a large one its address, its version and a sample. This notices writes to
    whole tensors. It may miss a write through `.data` to a few rows of a large tensor: comparing all of it would take as long as
    computing with it.

    Args:
        tensors: the tensors, not copied.
        most: the number of values of a small tensor.
        samples: the number of values that are compared of a large one.
    """

    def __init__(self, tensors: Sequence[Tensor], *, most: int = 1 << 14, samples: int = _SAMPLED) -> None:
        self._tensors = list(tensors)
        self._large = [tensor for tensor in tensors if tensor.numel() > most]
        self._states = self._states_of_large()
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            is_large = tensor.numel() > most
            compared = sampled(tensor, tensor.numel() // samples) if is_large else tensor
            by_dtype.setdefault(tensor.dtype, []).append(compared)
        self._values = [KeptValues(some) for some in by_dtype.values()]

    def matches(self, tensors: Iterable[Tensor | None]) -> bool:
        """Return whether these are the tensors, with the same memory and values."""
        return (
            all(map(is_, tensors, self._tensors))
            and (not self._large or self._states == self._states_of_large())
            and all(values.are_held() for values in self._values)
        )

    def _states_of_large(self) -> list[tuple[int, int]]:
        return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in self._large]


class Stamp:
    """Recognizes one tensor: the same object, on the same storage, with the same shape, strides and values.

    The tensor is referenced weakly. An inference tensor has no version, so its values are compared with a copy.

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


def sampled(tensor: Tensor, step: int) -> Tensor:
    """Return a view of about every `step`-th value of a tensor, in memory order: in each column in turn, where it is a matrix.

    With a step up to the length of a row it has a value of each row. Writes to the whole tensor show in it.
    """
    tensor = tensor.detach()
    dense = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if dense.is_contiguous():
        columns = max(1, dense.shape[-1] if dense.dim() < 2 else dense.stride(0))
        return dense.view(-1)[:: _coprime(max(1, step), columns)]
    while tensor.dim() > 2:
        tensor = tensor.select(-1, 0)
    return tensor.diagonal() if tensor.dim() == 2 else tensor


def _coprime(step: int, columns: int) -> int:
    """Return the next smaller step that visits all columns: a step of whole rows would stay in one of them."""
    return next(smaller for smaller in range(step, 0, -1) if math.gcd(smaller, columns) == 1)


def _layout(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _have_values(kept: KeptValues) -> bool:
    """Compare in PyTorch: the reference."""
    if any(tensor.dtype is not kept.values.dtype for tensor in kept.tensors):
        return False
    present = torch.cat([tensor.detach().reshape(-1) for tensor in kept.tensors])
    return torch.equal(present.view(torch.uint8), kept.values.view(torch.uint8))


_OPS: Any = torch.ops.hf_cpu_accel
