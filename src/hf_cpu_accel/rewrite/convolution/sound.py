"""Sound between convolutions over time: which ones stand where it is read or made, in every dtype, and how it has its channels last
in memory there."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor, VersionGuard
from hf_cpu_accel.rewrite.core.context import Context


def is_of_sound(module: nn.Module) -> bool:
    """A convolution over time whose input is one channel, several steps at once."""
    return _over_time(module) and _side(module, "in_channels") == 1 and _size(module) > 4


def gives_sound(module: nn.Module) -> bool:
    """A convolution over time whose output is one channel, of several steps at once."""
    return _over_time(module) and _side(module, "out_channels") == 1 and _size(module) > 1


def follows_sound(path: str, context: Context) -> bool:
    """Whether the first of its row of layers reads sound, or a convolution in the list around it reads or gives sound, which gains
    as a linear in every dtype: channels are last from there on, or up to there."""
    row, outer = _row_of(path), _list_around(path)
    for other, module in context.root.named_modules():
        if is_of_sound(module) and _row_of(other) == row:
            return True
        touches = is_of_sound(module) or gives_sound(module)
        if touches and outer is not None and _list_around(other) == outer:
            return True
    return False


def is_repeated(path: str, context: Context) -> bool:
    """Whether the convolution over time at `path` is one of several in the same place of layers in lists."""
    row = _row_of(path)
    others = (other for other, module in context.root.named_modules() if _over_time(module))
    return any(other != path and _row_of(other) == row for other in others)


class DeferredELU(LazyTensor):
    """The ELU (Clevert et al. 2015, arXiv:1511.07289) of sound [B, C, L] until it is known who reads it: a convolution wants zeros
    beside it."""

    _input: VersionGuard
    _alpha: float

    @classmethod
    def of(cls, input: Tensor, alpha: float) -> DeferredELU:
        deferred: DeferredELU = cls.like(input.shape, input.dtype, input.stride())
        deferred._input, deferred._alpha = VersionGuard(input, "ELU"), alpha
        return deferred

    def write_to(self, rows: Tensor) -> None:
        """The values into `rows` [B, L, C]."""
        if self._tensor is None:
            torch.ops.aten.elu.out(self._input.tensor().transpose(1, 2), self._alpha, out=rows)
        else:
            rows.copy_(self._tensor.transpose(1, 2))

    def _make(self) -> Tensor:
        return torch.nn.functional.elu(self._input.tensor(), self._alpha)


def has_channels_last(sound: Tensor) -> bool:
    """Whether sound [B, C, L] is rows of channels in memory, by its strides alone: a deferred one is not asked for its values."""
    batch, channels, length = sound.shape
    along = batch < 2 or sound.stride(0) == channels * length
    return along and sound.stride(1) == 1 and (length < 2 or sound.stride(2) == channels)


def rows_of_channels(sound: Tensor, before: int, after: int, value: float = 0.0) -> Tensor:
    """Sound [B, C, L] as [B, before + L + after, C], contiguous; itself where it lies so already, and nothing comes beside it."""
    rows = sound.transpose(1, 2) if not isinstance(sound, DeferredELU) else None
    if rows is not None and rows.is_contiguous() and not (before or after):
        return rows
    batch, channels, length = sound.shape
    output = torch.empty(batch, before + length + after, channels, dtype=sound.dtype)
    output[:, :before] = value
    output[:, before + length :] = value
    inside = output[:, before : before + length]
    if isinstance(sound, DeferredELU):
        sound.write_to(inside)
    else:
        inside.copy_(sound.transpose(1, 2))
    return output


def _row_of(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def _list_around(path: str) -> str | None:
    """What stands before the first number in a path; None without any, and where that is all of it."""
    found = re.match(r"(.*?\.)??\d+\.", path)
    return found[1] if found else None


def _over_time(module: Any) -> bool:
    """Whether it is a convolution over one dimension, or stands in for one."""
    size = getattr(module, "kernel_size", None)
    return isinstance(size, tuple) and len(size) == 1


def _size(module: Any) -> int:
    size: int = module.kernel_size[0]
    return size


def _side(module: Any, name: str) -> int | None:
    channels: int | None = getattr(module, name, None)
    return channels
