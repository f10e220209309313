"""Networks that mix patches of an image without attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.suites.nets.blocks import Residual

_PATCHES = 196  # of 16 x 16 pixels


class Transposed(nn.Module):
    """A module on [B, patches, C] that is applied along the patches."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


def _mlp(features: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features))


class SpatialGate(nn.Module):
    """Half of the features times the other half, which is mixed along the patches (Liu et al. 2021)."""

    def __init__(self, features: int):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(features // 2), nn.Linear(_PATCHES, _PATCHES)

    def forward(self, x: Tensor) -> Tensor:
        passed, gate = x.chunk(2, -1)
        return passed * self.mix(self.norm(gate).transpose(1, 2)).transpose(1, 2)


class Affine(nn.Module):
    """Features times a vector, plus a vector (Touvron et al. 2021)."""

    def __init__(self, features: int):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.beta, self.alpha, x)


class Patches(nn.Module):
    """Patches of an image, layers of them, and scores of classes of their mean."""

    def __init__(self, layers: list[nn.Module], features: int):
        super().__init__()
        self.stem = nn.Conv2d(3, features, 16, 16)
        self.layers, self.norm = nn.Sequential(*layers), nn.LayerNorm(features)
        self.classifier = nn.Linear(features, 1000)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values).flatten(2).transpose(1, 2)
        return self.classifier(self.norm(self.layers(x)).mean(1))


def mixer_b16() -> nn.Module:
    """MLP-Mixer-B/16 (Tolstikhin et al. 2021)."""
    layers: list[nn.Module] = []
    for _ in range(12):
        layers.append(Residual(nn.Sequential(nn.LayerNorm(768), Transposed(_mlp(_PATCHES, 384)))))
        layers.append(Residual(nn.Sequential(nn.LayerNorm(768), _mlp(768, 3072))))
    return Patches(layers, 768)


def gmlp_s16() -> nn.Module:
    """gMLP-S/16."""
    layers: list[nn.Module] = []
    for _ in range(30):
        ends = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1536), nn.GELU()), nn.Linear(768, 256)
        layers.append(Residual(nn.Sequential(ends[0], SpatialGate(1536), ends[1])))
    return Patches(layers, 256)


def resmlp_12() -> nn.Module:
    """ResMLP-12."""
    layers: list[nn.Module] = []
    for _ in range(12):
        mixed = nn.Sequential(Affine(384), Transposed(nn.Linear(_PATCHES, _PATCHES)), Affine(384))
        layers += [
            Residual(mixed),
            Residual(nn.Sequential(Affine(384), _mlp(384, 1536), Affine(384))),
        ]
    return Patches(layers, 384)


def convmixer_768_32() -> nn.Module:
    """ConvMixer-768/32 (Trockman and Kolter 2022)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 768, 7, 7), nn.ReLU(), nn.BatchNorm2d(768)]
    for _ in range(32):
        depthwise = nn.Conv2d(768, 768, 7, padding=3, groups=768)
        layers.append(Residual(nn.Sequential(depthwise, nn.ReLU(), nn.BatchNorm2d(768))))
        layers += [nn.Conv2d(768, 768, 1), nn.ReLU(), nn.BatchNorm2d(768)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768, 1000))
