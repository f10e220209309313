"""The layout of one weight in a checkpoint: its tensors, and their dequantization in PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_cpu_accel.packing.affine import AffineGroups

_ROWS_AT_ONCE = 1024

Tensors = Mapping[str, Tensor]
"""The tensors of one linear, by name without its path; on the meta device where only shapes and dtypes are known."""


class UnreadableCheckpoint(ValueError):
    """A quantized checkpoint is damaged, or its format is not supported. Nothing of it is loaded."""


@dataclass(frozen=True)
class Parts:
    """The integers of some output features: weight = scale * (q - zero).

    Attributes:
        q: uint8 [N, K].
        scale, zero: float32 [N, groups]; zero is an integer.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor


@dataclass(frozen=True, eq=False)
class Layout(ABC):
    """The layout of the weight of a linear.

    Attributes:
        form: its name, such as "GPTQ, 4 bits in groups of 128".
        out_features, in_features: of the linear.
        held: the tensors of the weight, on the meta device.
    """

    form: str
    out_features: int
    in_features: int
    held: Tensors

    @abstractmethod
    def check(self, tensors: Tensors) -> None:
        """Check the values after loading.

        Raises:
            UnreadableCheckpoint: a value is not valid.
        """

    @abstractmethod
    def values(self, tensors: Tensors, first: int, last: int) -> Tensor:
        """Return these output features in float32 [last - first, in_features]; `first` is a multiple of 32."""

    def dequantize(self, tensors: Tensors) -> Tensor:
        """Return the weight [out_features, in_features] in float32, computed in pieces to save memory."""
        weight = torch.empty(self.out_features, self.in_features)
        for first in range(0, self.out_features, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, self.out_features)
            weight[first:last] = self.values(tensors, first, last)
        return weight


@dataclass(frozen=True, eq=False)
class IntegerLayout(Layout):
    """The layout of a weight of integers with a scale and a zero per group.

    Attributes:
        bits: of an integer.
        group: the number of input features per scale and zero.
        scale: the name of the tensor of scales.
        index: the name of the tensor with the group of each input feature, or None for consecutive groups.
    """

    bits: int
    group: int
    scale: str
    index: str | None

    @abstractmethod
    def read(self, tensors: Tensors, first: int, last: int) -> Parts:
        """Return these output features, with the input features in their stored order; `first` is a multiple of 32."""

    @property
    def groups(self) -> int:
        return -(-self.in_features // self.group)

    @cached_property
    def packed_bits(self) -> int:
        return 4 if self.bits <= 4 else 8

    @cached_property
    def packed_group(self) -> int | None:
        """The group size of affine groups (packing/affine.py) for this weight; None if there is none."""
        if self.groups == 1:
            return -(-self.in_features // 64) * 64
        if self.group % 64 == 0:
            return self.group
        return next((group for group in (32, 16) if self.group % group == 0), None)

    def check(self, tensors: Tensors) -> None:
        _check_finite(self.scale, tensors[self.scale])
        if self.index is not None:
            index = tensors[self.index]
            least, most = (int(index.min()), int(index.max())) if index.numel() else (0, 0)
            if least < 0 or most >= self.groups:
                raise UnreadableCheckpoint(
                    f"{self.index} has groups from {least} to {most}: expected 0 to {self.groups - 1}"
                )

    def group_of(self, tensors: Tensors) -> Tensor:
        """Return the group of each input feature, int64 [in_features]."""
        if self.index is None or tensors[self.index].numel() == 0:
            return torch.arange(self.in_features) // self.group
        return tensors[self.index].detach().long()

    def order(self, tensors: Tensors) -> Tensor | None:
        """Return the input features sorted by group, int64 [in_features]; None if they are in that order.

        Raises:
            ValueError: the groups have other sizes than `group`.
        """
        group_of = self.group_of(tensors)
        expected = torch.arange(self.in_features) // self.group
        if torch.equal(group_of, expected):
            return None
        order = group_of.argsort(stable=True)
        if not torch.equal(group_of[order], expected):
            raise ValueError(f"its groups do not all have {self.group} input features")
        return order

    def rows(self, tensors: Tensors, first: int, last: int, order: Tensor | None = None) -> AffineGroups:
        """Return these output features, with the input features in `order`, in groups of `packed_group`."""
        assert self.packed_group is not None
        parts = self.read(tensors, first, last)
        q = parts.q if order is None else parts.q[:, order]
        scale, offset = parts.scale, -parts.scale * parts.zero
        times = 1 if self.groups == 1 else self.group // self.packed_group
        if times > 1:  # groups that the kernels do not support
            count = -(-self.in_features // self.packed_group)
            scale, offset = (t.repeat_interleave(times, dim=1)[:, :count] for t in (scale, offset))
        return AffineGroups(q.contiguous(), scale, offset, self.packed_bits, self.packed_group)

    def values(self, tensors: Tensors, first: int, last: int) -> Tensor:
        parts, group_of = self.read(tensors, first, last), self.group_of(tensors)
        return (parts.q - parts.zero[:, group_of]) * parts.scale[:, group_of]


@dataclass(frozen=True, eq=False)
class FloatLayout(Layout):
    """The layout of a weight of float8 numbers with scales, which affine groups cannot represent.

    Attributes:
        scale: the name of the tensor of scales.
    """

    scale: str

    def check(self, tensors: Tensors) -> None:
        _check_finite(self.scale, tensors[self.scale])
        if not bool(torch.isfinite(tensors["weight"].float()).all()):
            raise UnreadableCheckpoint("weight contains NaN")


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` fields of each row as uint8 [rows, count].

    Args:
        words: int32 [rows, words]; fields start at the lowest bits.
        bits: 2, 3, 4 or 8; fields of 3 bits cross words.
        count: the number of fields.
    """
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data[:, :count]
    if bits == 3:  # eight fields in three bytes
        data = data.reshape(len(data), -1, 3).int()
        fields = data[..., 0] | data[..., 1] << 8 | data[..., 2] << 16
        shifts = torch.arange(0, 24, 3, dtype=torch.int32)
    else:
        fields, shifts = data, torch.arange(0, 8, bits, dtype=torch.uint8)
    unpacked = (fields.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return unpacked.view(len(data), -1)[:, :count].to(torch.uint8)


def words_for(fields: int, bits: int) -> int:
    """Return the number of 32-bit words for `fields` fields."""
    return -(-fields * bits // 32)


def checked_group(method: str, group: object) -> int:
    """Return the group size of a config; -1 is a whole row.

    Raises:
        UnreadableCheckpoint: it is neither -1 nor a positive integer.
    """
    if not isinstance(group, int) or (group != -1 and group <= 0):
        raise UnreadableCheckpoint(
            f"{method} with group_size={group!r} is not supported; expected -1 or a positive integer"
        )
    return group


def check_tensor(
    path: str, name: str, tensors: Tensors, shape: tuple[int, ...], *dtypes: torch.dtype
) -> None:
    """Check the shape and dtype of a tensor.

    Raises:
        UnreadableCheckpoint: it is missing, or has another shape or dtype.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise UnreadableCheckpoint(f"{path}.{name} is missing; found {', '.join(sorted(tensors))}")
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise UnreadableCheckpoint(
            f"{path}.{name} has dtype {tensor.dtype} and shape {list(tensor.shape)}: expected {expected} {list(shape)}"
        )


def _check_finite(name: str, values: Tensor) -> None:
    if not bool(torch.isfinite(values.float()).all()):
        raise UnreadableCheckpoint(f"{name} contains NaN or infinity")
