"""Blocks of convolutional networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Activation = Callable[[], nn.Module] | None


def conv_norm(
    inputs: int,
    outputs: int,
    size: int = 1,
    stride: int = 1,
    groups: int = 1,
    activation: Activation = nn.ReLU,
) -> nn.Sequential:
    """Convolution with "same" padding, batch norm, and an activation where there is one."""
    padding = (size - 1) // 2
    layers = [
        nn.Conv2d(inputs, outputs, size, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([activation()] if activation is not None else []))


def leaky(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """The same with LeakyReLU, as Darknets have it."""
    return conv_norm(inputs, outputs, size, stride, activation=lambda: nn.LeakyReLU(0.1))


class Residual(nn.Module):
    """x + branch(x), and an activation after it where there is one."""

    def __init__(
        self, branch: nn.Module, shortcut: nn.Module | None = None, activation: nn.Module | None = None
    ):
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut or nn.Identity()
        self.activation = activation or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.branch(x) + self.shortcut(x))


class SqueezeExcite(nn.Module):
    """Channels times a gate that is computed of their means (Hu et al. 2018)."""

    def __init__(self, channels: int, squeezed: int, gate: Callable[[], nn.Module] = nn.Hardsigmoid):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce, self.expand = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.activation, self.gate = nn.ReLU(), gate()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.expand(self.activation(self.reduce(self.pool(x)))))


class Classifier(nn.Module):
    """Features of an image [B, 3, H, W], their means, and a linear that gives scores of classes [B, classes]."""

    def __init__(self, features: nn.Module, channels: int, classes: int = 1000):
        super().__init__()
        self.features = features
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(pixel_values)), 1))
