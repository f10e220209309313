"""The steps of a chain of convolutions, and their layout as integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.convolution import is_grouped
from hf_cpu_accel.packing.linear import PackedWeight

SAME = -1  # the `more` of `same_padding`
# Of sums and products; what multiplies has ACTIVATIONS.
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": functional.hardsigmoid,
}


@dataclass(frozen=True)
class ConvolutionStep:
    """activation(conv2d(image[source], weight) + bias + image[residual]); arguments as in `ops.convolution.conv2d`.

    Attributes:
        source, residual: indices of images: 0 is the input of the op, i + 1 the output of step i. residual may be None.
        weight: with data of `packing.convolution.pack_grouped`, a grouped convolution without a residual.
        range: (low, high) to clamp the output to, with 0 between them. The output is then an image in bytes, which may be pooled,
            added to others, and read by int8 weights of windows and tiles. None for a floating point image.
        more: the additional zeros after the image; `padding` is then the zeros before it. SAME for both sides is the padding of
            TensorFlow, `same_padding` of the size of the image.
    """

    weight: PackedWeight
    bias: Tensor | None
    source: int
    residual: int | None
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    activation: str
    range: tuple[float, float] | None = None
    more: tuple[int, int] = (0, 0)

    @property
    def is_grouped(self) -> bool:
        return is_grouped(self.weight.data)

    @property
    def kind(self) -> str:
        return "grouped" if self.is_grouped else "convolution"


@dataclass(frozen=True)
class PoolingStep:
    """The maximum or mean of each window of image[source], per channel; arguments as in `torch.nn.functional.max_pool2d`.

    The maximum of an image in bytes has the same range.

    Attributes:
        source: see `ConvolutionStep`.
        channels: of that image.
        kind: one of `abi.STEP_KINDS`; "average pooling" includes the zeros around the image, "average pooling within" excludes
            them.
    """

    source: int
    channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    kind: str = "max pooling"


@dataclass(frozen=True)
class MeanStep:
    """The mean of each channel of image[source], an image of one pixel. Attributes as in `PoolingStep`."""

    kind: ClassVar[str] = "mean"
    source: int
    channels: int


@dataclass(frozen=True)
class CombineStep:
    """activation(image[source] + image[residual]), or of their product; attributes as in `ConvolutionStep`.

    Attributes:
        channels: of both images. The second may have one pixel, for all of the first.
        residual: None for the activation of one image.
        product: whether they are multiplied.
        activation: one of POINTWISE.
    """

    source: int
    channels: int
    residual: int | None
    product: bool
    activation: str

    @property
    def kind(self) -> str:
        return "product" if self.product else "sum"


@dataclass(frozen=True)
class ChannelsStep:
    """Selected channels of image[source], or of image[source] and image[residual] concatenated.

    Attributes:
        source, residual: see `ConvolutionStep`; the two have the same size.
        numbers: the index of the channel for each output channel.
    """

    kind: ClassVar[str] = "channels"
    source: int
    residual: int | None
    numbers: tuple[int, ...]

    @property
    def channels(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True, eq=False)
class AffineStep:
    """activation(gain * image[source] + shift) per channel: a batch norm before a convolution.

    Attributes:
        source: see `ConvolutionStep`.
        gain, shift: [channels] float32.
        activation: one of POINTWISE.
    """

    kind: ClassVar[str] = "affine"
    source: int
    gain: Tensor
    shift: Tensor
    activation: str

    @property
    def channels(self) -> int:
        return len(self.gain)


Step = ConvolutionStep | PoolingStep | MeanStep | CombineStep | ChannelsStep | AffineStep
