"""Audio between 1-d convolutions: find the ones that read or create audio, and keep channels last in memory between them."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor, VersionGuard
from hf_cpu_accel.rewrite.core.context import Context


def is_of_sound(module: nn.Module) -> bool:
    """Return whether the module is a 1-d convolution with one input channel and more than four steps."""
    return _over_time(module) and _side(module, "in_channels") == 1 and _size(module) > 4


def gives_sound(module: nn.Module) -> bool:
    """Return whether the module is a 1-d convolution with one output channel and several steps."""
    return _over_time(module) and _side(module, "out_channels") == 1 and _size(module) > 1


def follows_sound(path: str, context: Context) -> bool:
    """Return whether the first of its row of layers reads audio, or a convolution in the list around it reads or creates audio.
    Then a linear gains in every dtype: channels are last from there on, or up to there."""
    row, outer = _row_of(path), _list_around(path)
    for other, module in context.root.named_modules():
        if is_of_sound(module) and _row_of(other) == row:
            return True
        touches = is_of_sound(module) or gives_sound(module)
        if touches and outer is not None and _list_around(other) == outer:
            return True
    return False


def is_repeated(path: str, context: Context) -> bool:
    """Return whether the 1-d convolution at `path` is one of several in the same place of layers in lists."""
    row = _row_of(path)
    others = (other for other, module in context.root.named_modules() if _over_time(module))
    return any(other != path and _row_of(other) == row for other in others)


class DeferredELU(LazyTensor):
    """The ELU (Clevert et al. 2015, arXiv:1511.07289) of audio [B, C, L] before its reader is known: a convolution needs padding
    around it."""

    _input: VersionGuard
    _alpha: float

    @classmethod
    def of(cls, input: Tensor, alpha: float) -> DeferredELU:
        deferred: DeferredELU = cls.like(input.shape, input.dtype, input.stride())
        deferred._input, deferred._alpha = VersionGuard(input, "ELU"), alpha
        return deferred

    def write_to(self, rows: Tensor) -> None:
        """Write the values into `rows` [B, L, C]."""
        if self._tensor is None:
            torch.ops.aten.elu.out(self._input.tensor().transpose(1, 2), self._alpha, out=rows)
        else:
            rows.copy_(self._tensor.transpose(1, 2))

    def _make(self) -> Tensor:
        return torch.nn.functional.elu(self._input.tensor(), self._alpha)


def has_channels_last(sound: Tensor) -> bool:
    """Return whether audio [B, C, L] has channels last in memory, by its strides alone: deferred audio is not computed."""
    batch, channels, length = sound.shape
    along = batch < 2 or sound.stride(0) == channels * length
    return along and sound.stride(1) == 1 and (length < 2 or sound.stride(2) == channels)


def rows_of_channels(sound: Tensor, before: int, after: int, value: float = 0.0) -> Tensor:
    """Return audio [B, C, L] as [B, before + L + after, C], contiguous; a view if it has this layout already and needs no
    padding."""
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
    """Return the part of a path before its first number, or None if there is no number or nothing follows it."""
    found = re.match(r"(.*?\.)??\d+\.", path)
    return found[1] if found else None


def _over_time(module: Any) -> bool:
    """Return whether the module is a 1-d convolution, or replaces one."""
    size = getattr(module, "kernel_size", None)
    return isinstance(size, tuple) and len(size) == 1


def _size(module: Any) -> int:
    size: int = module.kernel_size[0]
    return size


def _side(module: Any, name: str) -> int | None:
    channels: int | None = getattr(module, name, None)
    return channels
