"""Images between chains of convolutions, which read them rounded to bfloat16 in any case."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.rewrite.lazy_tensor import LazyTensor


class NarrowImage(LazyTensor):
    """An image in bfloat16 that passes for the float32 one which the module around it promises.

    Attributes:
        rounded: [N, C, H, W] bfloat16, channels last: for readers that know what this is.
    """

    rounded: Tensor

    @classmethod
    def of(cls, rounded: Tensor) -> NarrowImage:
        image: NarrowImage = cls.like(rounded.shape, torch.float32, rounded.stride())
        image.rounded = rounded
        return image

    def _make(self) -> Tensor:
        return self.rounded.float()
