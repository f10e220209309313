"""The steps of a chain of convolutions, and the numbers that the op takes them as."""

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

# What a step is: the number of its `kind`.
KINDS = (
    *("convolution", "max pooling", "grouped", "mean", "sum", "product", "channels", "affine"),
    *("average pooling", "average pooling within"),
)
# The numbers of one step in `layout`, in this order (csrc/convolution/steps.h reads it): its kind; places in `parts`, -1 for none;
# which image it reads and which is added or multiplied into it, -1 for none; and for each side of the window, [height, width], what
# `conv2d` calls by these names, and how many more zeros lie behind the image than before it, SAME for those of `same_padding`.
WINDOW = ("size", "stride", "padding", "dilation", "more")
LAYOUT = (
    *("kind", "weight", "scale", "bias", "range", "source", "residual", "out_channels", "activation"),
    *(f"{name}_{side}" for name in WINDOW for side in ("rows", "columns")),
)
SAME = -1
# Of sums and products; what multiplies has ACTIVATIONS.
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": functional.hardsigmoid,
}


@dataclass(frozen=True)
class ConvolutionStep:
    """activation(conv2d(image[source], weight) + bias + image[residual]); arguments as those of `ops.convolution.conv2d`.

    Attributes:
        source, residual: numbers of images: 0 is the input of the op, i + 1 the output of step i. residual may be None.
        weight: with the data of `packing.convolution.pack_grouped`, channels are convolved in groups, and nothing is added.
        range: (low, high) that the output is clamped to, with 0 between them: it is an image in bytes then, which
            may be pooled, added to others, and read by int8 weights of windows and tiles. None: a floating point image.
        more: how many zeros lie behind the image besides `padding`, which then is before it; SAME for both sides: padding as
            TensorFlow has it, `same_padding` of the size of the image.
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
    """The largest pixel of each window of image[source], by channel, or their mean; arguments as those of
    `torch.nn.functional.max_pool2d`.

    Of an image in bytes the largest ones are one of the same range.

    Attributes:
        source: see `ConvolutionStep`.
        channels: of that image.
        kind: one of KINDS; "average pooling" counts the zeros around the image, "average pooling within" does not.
    """

    source: int
    channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    kind: str = "max pooling"


@dataclass(frozen=True)
class MeanStep:
    """The mean of each channel of image[source]: an image of one pixel. Attributes as those of `PoolingStep`."""

    kind: ClassVar[str] = "mean"
    source: int
    channels: int


@dataclass(frozen=True)
class CombineStep:
    """activation(image[source] + image[residual]), or of their product; attributes as those of `ConvolutionStep`.

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
    """Channels of image[source], or of it and image[residual] beside each other: some of them, or in another order.

    Attributes:
        source, residual: see `ConvolutionStep`; the two have the same size.
        numbers: of the channels that are taken, one for each of the output.
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
    """activation(gain * image[source] + shift), channel by channel: a batch norm ahead of a convolution.

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
