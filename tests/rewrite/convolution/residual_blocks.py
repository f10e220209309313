"""Residual blocks of two layers as in models, also with modules between them, in a stage."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.rewrite.convolution.convolution_blocks import Layer, with_statistics

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.06}


class Block(nn.Module):
    """As in transformers' ResNet: two layers, the shortcut an identity or a convolution, the sum in place."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        same = channels == out_channels
        self.shortcut = nn.Identity() if same else Layer(channels, out_channels, 1, act=nn.Identity())
        first = Layer(channels, out_channels, 3, act=nn.ReLU())
        self.layer = nn.Sequential(first, Layer(out_channels, out_channels, 3, act=nn.Identity()))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.layer(x)
        x += self.shortcut(residual)
        return self.activation(x)


class Squeezed(Block):
    """Something between two convolutions that is none."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.mean()


class Scaled(Block):
    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__(channels, out_channels)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class InPlace(Block):
    """Writes to its input before the convolutions read it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.relu(x, inplace=True))


def host(*blocks: nn.Module) -> nn.Module:
    """The blocks in a stage, which is no target itself."""
    return with_statistics(nn.ModuleDict({"stage": nn.Sequential(*blocks)}))


def image(channels: int = 32) -> Tensor:
    return torch.randn(2, channels, 11, 9).contiguous(memory_format=torch.channels_last)


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs).norm() / theirs.norm())


class Damped(Block):
    """Writes to the output of a convolution, by less than the verification would detect in int8."""

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer[1](self.layer[0](x).mul_(0.99)) + self.shortcut(x))


class Clamped(Block):
    """Does something to numbers that no small image of random ones has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp_(max=1e4)


class Widened(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class Stem(nn.Module):
    """As in transformers' ResNet, with its pooling."""

    def __init__(self, pooling: nn.Module, channels: int = 3) -> None:
        super().__init__()
        self.embedder, self.pooler = Layer(channels, 64, 7, act=nn.ReLU()), pooling

    def forward(self, x: Tensor) -> Tensor:
        return self.pooler(self.embedder(x))
