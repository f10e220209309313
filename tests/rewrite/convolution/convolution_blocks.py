"""Small hosts of convolutions and batch norms, written as libraries write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def with_statistics(model: nn.Module) -> nn.Module:
    """In eval mode, with statistics and parameters as training leaves them: signs of both kinds, one channel switched off."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | FrozenNorm) and module.running_mean is not None:
            with torch.no_grad():
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.weight.normal_().add_(0.3)
                module.weight[1] = 0
                module.bias.normal_()
    return model.eval()


class FrozenNorm(nn.Module):
    """A batch norm whose numbers are all buffers, as in DETR."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class Layer(nn.Module):
    """Convolution, norm, activation (ResNet of transformers); the norm may be registered first."""

    def __init__(
        self, channels: int, out_channels: int, size: int, *, act: nn.Module, frozen: bool = False
    ) -> None:
        super().__init__()
        norm = FrozenNorm(out_channels) if frozen else nn.BatchNorm2d(out_channels)
        if frozen:
            self.norm = norm
        self.convolution = nn.Conv2d(channels, out_channels, size, padding=size // 2, bias=frozen)
        self.norm = norm
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.convolution(x)))


class Bottleneck(nn.Module):
    """All parts side by side, the residual added in place (torchvision)."""

    def __init__(self, channels: int, inner: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=2, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, 2 * inner, 1, bias=False), nn.BatchNorm2d(2 * inner)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(channels, 2 * inner, 1, stride), nn.BatchNorm2d(2 * inner))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.downsample(x)
        return self.relu(out)


class Residual(nn.Module):
    """Two convolutions and a residual, with the activation before each of them (DPT)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.convolution1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.convolution2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.convolution2(self.act(self.convolution1(self.act(x))))
        return hidden + x


class Fork(nn.Module):
    """The input of the norm has a second reader."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(channels, channels, 3), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        output = self.convolution(x)
        return functional.relu(self.norm(output)) + output
