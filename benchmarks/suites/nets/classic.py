"""Networks that classify images by ordinary convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.suites.nets.blocks import Classifier, Residual, conv_norm, leaky


def alexnet() -> nn.Module:
    """AlexNet, as torchvision has it (Krizhevsky 2014)."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.AdaptiveAvgPool2d(6), nn.Flatten(),
        nn.Dropout(), nn.Linear(9216, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000),
    )  # fmt: skip


def vgg16() -> nn.Module:
    """VGG-16 (Simonyan and Zisserman 2015)."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    hidden = [nn.Linear(25088, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Flatten(), *hidden, nn.Linear(4096, 1000))


class Dense(nn.Module):
    """Concatenate the input and the output of a branch (Huang et al. 2017)."""

    def __init__(self, inputs: int, growth: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.layers(x)), 1)


def densenet121() -> nn.Module:
    """DenseNet-121."""
    layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for number, repeats in enumerate((6, 12, 24, 16)):
        for _ in range(repeats):
            layers.append(Dense(channels, 32))
            channels += 32
        if number < 3:
            half = nn.Conv2d(channels, channels // 2, 1, bias=False)
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), half, nn.AvgPool2d(2)]
            channels //= 2
    return Classifier(nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU()), channels)


def _bottleneck(inputs: int, width: int, outputs: int, stride: int, groups: int) -> nn.Module:
    branch = nn.Sequential(
        conv_norm(inputs, width),
        conv_norm(width, width, 3, stride, groups=groups),
        conv_norm(width, outputs, activation=None),
    )
    is_same = stride == 1 and inputs == outputs
    return Residual(
        branch, None if is_same else conv_norm(inputs, outputs, 1, stride, activation=None), nn.ReLU()
    )


def _basic(inputs: int, outputs: int, stride: int) -> nn.Module:
    branch = nn.Sequential(
        conv_norm(inputs, outputs, 3, stride), conv_norm(outputs, outputs, 3, activation=None)
    )
    is_same = stride == 1 and inputs == outputs
    return Residual(
        branch, None if is_same else conv_norm(inputs, outputs, 1, stride, activation=None), nn.ReLU()
    )


def resnet(depths: tuple[int, ...], groups: int = 1, width: int = 64) -> nn.Module:
    """ResNets of bottlenecks, or ResNeXts where there are groups (He et al. 2016, Xie et al. 2017)."""
    layers, inputs = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
    for stage, repeats in enumerate(depths):
        outputs, inner = 256 * 2**stage, width * 2**stage
        for number in range(repeats):
            stride = 2 if number == 0 and stage > 0 else 1
            layers.append(_bottleneck(inputs, inner, outputs, stride, groups))
            inputs = outputs
    return Classifier(nn.Sequential(*layers), inputs)


def resnet18() -> nn.Module:
    """ResNet-18, whose blocks have two convolutions."""
    layers, inputs = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
    for stage in range(4):
        for number in range(2):
            layers.append(_basic(inputs, 64 * 2**stage, 2 if number == 0 and stage > 0 else 1))
            inputs = 64 * 2**stage
    return Classifier(nn.Sequential(*layers), inputs)


class RepVGG(nn.Module):
    """3 x 3 and 1 x 1 convolutions and a norm of the input, added up (Ding et al. 2021)."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.three = conv_norm(inputs, outputs, 3, stride, activation=None)
        self.one = conv_norm(inputs, outputs, 1, stride, activation=None)
        self.norm = nn.BatchNorm2d(inputs) if inputs == outputs and stride == 1 else None
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        total = self.three(x) + self.one(x)
        return self.activation(total if self.norm is None else total + self.norm(x))


def repvgg_a2() -> nn.Module:
    """RepVGG-A2, as it is trained."""
    layers, inputs = [RepVGG(3, 64, 2)], 64
    for outputs, repeats in ((96, 2), (192, 4), (384, 14), (1408, 1)):
        for number in range(repeats):
            layers.append(RepVGG(inputs, outputs, 2 if number == 0 else 1))
            inputs = outputs
    return Classifier(nn.Sequential(*layers), inputs)


class CrossStage(nn.Module):
    """Half of the channels go through residual blocks (Wang et al. 2020); in the first stage as many as there are go each way."""

    def __init__(self, inputs: int, outputs: int, repeats: int, *, is_first: bool):
        super().__init__()
        half, inner = (outputs, outputs // 2) if is_first else (outputs // 2, outputs // 2)
        self.down = leaky(inputs, outputs, 3, 2)
        self.passed = leaky(outputs, half, 1)
        blocks = [
            Residual(nn.Sequential(leaky(half, inner, 1), leaky(inner, half, 3))) for _ in range(repeats)
        ]
        self.blocks = nn.Sequential(leaky(outputs, half, 1), *blocks, leaky(half, half, 1))
        self.join = leaky(2 * half, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.join(torch.cat((self.passed(x), self.blocks(x)), 1))


def cspdarknet53() -> nn.Module:
    """CSPDarknet-53."""
    layers: list[nn.Module] = [leaky(3, 32, 3)]
    inputs = 32
    for outputs, repeats in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
        layers.append(CrossStage(inputs, outputs, repeats, is_first=outputs == 64))
        inputs = outputs
    return Classifier(nn.Sequential(*layers), inputs)
