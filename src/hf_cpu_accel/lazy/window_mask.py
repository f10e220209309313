"""The mask of encoders with a local window, computed only if it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.lazy.causal_mask import same_function
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor


class WindowMask(LazyTensor):
    """bool [B, 1, L, L], True where to attend: keys at most `window` tokens away, without padding.

    Attributes:
        window: the number of tokens before and after a query.
        padding: bool [B, L], True at tokens, or None without padding.
    """

    window: int
    padding: Tensor | None

    @classmethod
    def of(cls, batch_size: int, length: int, window: int, padding: Tensor | None) -> WindowMask:
        mask: WindowMask = cls.like((batch_size, 1, length, length), torch.bool)
        # A copy, because the caller may write to it before this mask is read.
        mask.window, mask.padding = window, None if padding is None else padding.clone()
        return mask

    def _make(self) -> Tensor:
        position = torch.arange(self.shape[2])
        near = ((position - position[:, None]).abs() <= self.window)[None, None]
        return near.expand(self.shape) if self.padding is None else near & self.padding[:, None, None]


def is_window(function: Callable[..., Any] | None, window: int) -> bool:
    """Return whether `function` is transformers' mask function of a window of that size on both sides."""
    try:
        from transformers.masking_utils import sliding_window_bidirectional_mask_function
    except ImportError:  # this version has no such function
        return False
    return function is not None and same_function(
        function, sliding_window_bidirectional_mask_function(window)
    )
