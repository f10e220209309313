"""The mask of encoders whose tokens attend to those around them, made only where it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.lazy.causal_mask import same_function
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor


class WindowMask(LazyTensor):
    """bool [B, 1, L, L], True where to attend: keys at most `window` tokens away that are no padding.

    Attributes:
        window: tokens before and after a query.
        padding: bool [B, L], True where there is a token, or None if there is nothing else.
    """

    window: int
    padding: Tensor | None

    @classmethod
    def of(cls, batch_size: int, length: int, window: int, padding: Tensor | None) -> WindowMask:
        mask: WindowMask = cls.like((batch_size, 1, length, length), torch.bool)
        # A copy: it may be the caller's own, who may write to it before this mask is read.
        mask.window, mask.padding = window, None if padding is None else padding.clone()
        return mask

    def _make(self) -> Tensor:
        position = torch.arange(self.shape[2])
        near = ((position - position[:, None]).abs() <= self.window)[None, None]
        return near.expand(self.shape) if self.padding is None else near & self.padding[:, None, None]


def is_window(function: Callable[..., Any] | None, window: int) -> bool:
    """Whether `function` is transformers' mask function of a window on both sides: other overlays have a size, too."""
    try:
        from transformers.masking_utils import sliding_window_bidirectional_mask_function
    except ImportError:  # a version that has none
        return False
    return function is not None and same_function(
        function, sliding_window_bidirectional_mask_function(window)
    )
