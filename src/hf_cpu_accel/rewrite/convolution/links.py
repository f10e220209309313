"""The links of a chain of convolutions: the calls of a module's parts, and the ops between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.ops.chain.reference import same_padding
from hf_cpu_accel.ops.chain.steps import (
    POINTWISE,
    SAME,
    AffineStep,
    ChannelsStep,
    CombineStep,
    ConvolutionStep,
    MeanStep,
    PoolingStep,
)
from hf_cpu_accel.rewrite.convolution.chain_parts import gain_and_shift
from hf_cpu_accel.rewrite.convolution.epilogue import Epilogue


@dataclass(frozen=True)
class Zeros:
    """The zeros that a module puts around the image before a convolution.

    Attributes:
        top, bottom, left, right: rows and columns of zeros.
        same: whether they are those of TensorFlow's padding "same" for every size of image.
    """

    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0
    same: bool = False

    def around(self, image: Tensor, window: Any) -> Tensor:
        """Return `image` with the zeros around it, for a convolution."""
        zeros = zeros_of_same(image, window) if self.same else self
        return functional.pad(image, (zeros.left, zeros.right, zeros.top, zeros.bottom))


def zeros_of_same(image: Tensor, window: Any) -> Zeros:
    """Return the zeros of padding "same" of a convolution around an image of that size."""
    sides = zip(image.shape[2:], window.kernel_size, window.stride, window.dilation, strict=True)
    (top, bottom), (left, right) = (same_padding(*side) for side in sides)
    return Zeros(top, bottom, left, right, same=True)


@dataclass(frozen=True)
class Link:
    """One convolution of a chain.

    Attributes:
        path: its path in the module.
        source, residual: numbers of images: 0 is the module's input, i + 1 the output of link i.
        normalized, activation: see `Epilogue`.
        zeros: the zeros around image `source` besides the convolution's own padding, or None.
    """

    path: str
    source: int
    residual: int | None
    normalized: bool
    activation: str
    zeros: Zeros | None = None

    def step(self, root: nn.Module) -> ConvolutionStep:
        """Return the step for the current weights of the module."""
        convolution: Any = root.get_submodule(self.path)
        weight, bias = convolution.own_weight(normalized=self.normalized)
        padding, more = convolution.padding, (0, 0)
        if self.zeros is not None and self.zeros.same:
            more = (SAME, SAME)
        elif self.zeros is not None:
            zeros = self.zeros
            padding = (padding[0] + zeros.top, padding[1] + zeros.left)
            more = (zeros.bottom - zeros.top, zeros.right - zeros.left)
        return ConvolutionStep(
            weight=weight,
            bias=bias,
            source=self.source,
            residual=self.residual,
            kernel_size=convolution.kernel_size,
            stride=convolution.stride,
            padding=padding,
            dilation=convolution.dilation,
            activation=self.activation,
            more=more,
        )

    def compute(self, root: nn.Module, images: Sequence[Tensor]) -> Tensor:
        """Return the output for the images before it."""
        convolution: Any = root.get_submodule(self.path)
        residual = None if self.residual is None else images[self.residual]
        source = images[self.source]
        if self.zeros is not None:
            source = self.zeros.around(source, convolution)
        output: Tensor = convolution.compute(source, Epilogue(self.normalized, residual, self.activation))
        return output


@dataclass(frozen=True)
class PoolingLink:
    """A pooling in a chain; see `Link`.

    Attributes:
        channels: of the image.
    """

    path: str
    source: int
    channels: int

    def step(self, root: nn.Module) -> PoolingStep:
        pooling: Any = root.get_submodule(self.path)
        windows = (_pair(pooling.kernel_size), _pair(pooling.stride), _pair(pooling.padding))
        kind = "max pooling"
        if isinstance(pooling, nn.AvgPool2d):
            kind = "average pooling" if pooling.count_include_pad else "average pooling within"
        return PoolingStep(self.source, self.channels, *windows, kind)

    def compute(self, root: nn.Module, images: Sequence[Tensor]) -> Tensor:
        """Return the output for the images before it."""
        output: Tensor = root.get_submodule(self.path)(images[self.source])
        return output


@dataclass(frozen=True)
class AffineLink:
    """A batch norm before a convolution, and the activation between them; see `PoolingLink`."""

    path: str
    source: int
    channels: int
    activation: str = "none"

    def step(self, root: nn.Module) -> AffineStep:
        gain, shift = gain_and_shift(root.get_submodule(self.path))
        return AffineStep(self.source, gain, shift, self.activation)

    def compute(self, root: nn.Module, images: Sequence[Tensor]) -> Tensor:
        """Return the output for the images before it."""
        return POINTWISE[self.activation](root.get_submodule(self.path)(images[self.source]))


@dataclass(frozen=True)
class MeanLink:
    """The means of an image's channels; see `PoolingLink`."""

    source: int
    channels: int

    def step(self, root: nn.Module) -> MeanStep:
        return MeanStep(self.source, self.channels)

    def compute(self, root: nn.Module, images: Sequence[Tensor]) -> Tensor:
        """Return the output for the images before it."""
        return images[self.source].mean((2, 3), keepdim=True)


@dataclass(frozen=True)
class CombineLink:
    """An activation of an image, or of its sum or product with another one; see `CombineStep`."""

    source: int
    channels: int
    residual: int | None
    product: bool
    activation: str

    def step(self, root: nn.Module) -> CombineStep:
        return CombineStep(self.source, self.channels, self.residual, self.product, self.activation)

    def compute(self, root: nn.Module, images: Sequence[Tensor]) -> Tensor:
        """Return the output for the images before it."""
        image = images[self.source]
        if self.residual is not None:
            other = images[self.residual]
            image = image * other if self.product else image + other
        return POINTWISE[self.activation](image)


@dataclass(frozen=True)
class ChannelsLink:
    """Channels of an image, or of two images concatenated; see `ChannelsStep`."""

    source: int
    residual: int | None
    numbers: tuple[int, ...]

    def step(self, root: nn.Module) -> ChannelsStep:
        return ChannelsStep(self.source, self.residual, self.numbers)

    def compute(self, root: nn.Module, images: Sequence[Tensor]) -> Tensor:
        """Return the output for the images before it."""
        image = images[self.source]
        if self.residual is not None:
            image = torch.cat((image, images[self.residual]), 1)
        return image[:, list(self.numbers)]


AnyLink = Link | PoolingLink | AffineLink | MeanLink | CombineLink | ChannelsLink
Chain = tuple[AnyLink, ...]


def shorten_chain(links: Sequence[AnyLink]) -> Chain:
    """Return the chain without images that no other link reads, and with activations inside of the step before them if nothing
    else reads its output."""
    chain = list(_without_unread(links))
    readers = Counter(image for link in chain for image in _images_read(link).values())
    for number, link in enumerate(chain):
        before = chain[link.source - 1] if link.source > 0 else None
        if not (isinstance(link, CombineLink) and link.residual is None and readers[link.source] == 1):
            continue
        if isinstance(before, AffineLink | CombineLink) and before.activation == "none":
            chain[number] = replace(before, activation=link.activation)
    return _without_unread(chain)


def _without_unread(links: Sequence[AnyLink]) -> Chain:
    read, kept = {len(links)}, []
    for number in range(len(links), 0, -1):
        if number in read:
            kept.append(number)
            read.update(_images_read(links[number - 1]).values())
    numbers = {number: place for place, number in enumerate([0, *reversed(kept)])}
    chain = []
    for link in (links[number - 1] for number in reversed(kept)):
        images: Any = {name: numbers[image] for name, image in _images_read(link).items()}
        chain.append(replace(link, **images))
    return tuple(chain)


def _images_read(link: AnyLink) -> dict[str, int]:
    residual = getattr(link, "residual", None)
    return {"source": link.source} if residual is None else {"source": link.source, "residual": residual}


def _pair(sizes: int | tuple[int, ...]) -> tuple[int, int]:
    sides = (sizes,) if isinstance(sizes, int) else sizes
    return sides[0], sides[-1]  # torch also accepts a tuple of one number
