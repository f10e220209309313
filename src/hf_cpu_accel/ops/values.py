"""keep_values, have_values, drop_values: check whether tensors have changed; `sampled`: a sample of a large tensor to compare.

The library stores pointers to hundreds of small tensors, because passing them to an op in each call takes longer than comparing
them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.kept import Kept, can_keep


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


def _have_values(kept: KeptValues) -> bool:
    """Compare in PyTorch: the reference."""
    if any(tensor.dtype is not kept.values.dtype for tensor in kept.tensors):
        return False
    present = torch.cat([tensor.detach().reshape(-1) for tensor in kept.tensors])
    return torch.equal(present.view(torch.uint8), kept.values.view(torch.uint8))


_OPS: Any = torch.ops.hf_cpu_accel
