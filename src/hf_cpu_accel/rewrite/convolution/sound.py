"""Which convolutions over time stand where sound is read or made: channels are last in memory there, in every dtype."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

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
