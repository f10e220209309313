"""Networks for phones: depthwise convolutions, gates of channels, and Hardswish."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.suites.nets.blocks import Activation, Classifier, Residual, SqueezeExcite, conv_norm


def inverted(
    inputs: int,
    width: int,
    outputs: int,
    size: int,
    stride: int,
    activation: Activation,
    squeezed: int = 0,
) -> nn.Module:
    """Wider, depthwise, gated, narrower (Sandler et al. 2018)."""
    layers = [conv_norm(inputs, width, activation=activation)] if width != inputs else []
    layers.append(conv_norm(width, width, size, stride, groups=width, activation=activation))
    if squeezed:
        layers.append(SqueezeExcite(width, squeezed))  # type: ignore[arg-type]
    layers.append(conv_norm(width, outputs, activation=None))
    branch = nn.Sequential(*layers)
    return Residual(branch) if stride == 1 and inputs == outputs else branch


# Size, width, outputs, gated, Hardswish, stride (Howard et al. 2019, table 1).
_LARGE = (
    (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1),
)  # fmt: skip


class MobileNetV3(nn.Module):
    """The large one."""

    def __init__(self) -> None:
        super().__init__()
        layers, inputs = [conv_norm(3, 16, 3, 2, activation=nn.Hardswish)], 16
        for size, width, outputs, is_gated, is_hard, stride in _LARGE:
            activation = nn.Hardswish if is_hard else nn.ReLU
            squeezed = width // 4 // 8 * 8 if is_gated else 0
            layers.append(inverted(inputs, width, outputs, size, stride, activation, squeezed))  # type: ignore[arg-type]
            inputs = outputs
        layers.append(conv_norm(inputs, 960, activation=nn.Hardswish))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(960, 1280), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1280, 1000)
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(pixel_values)), 1))


# Factor of width, outputs, repeats, stride, size.
_MNASNET = (
    (3, 24, 3, 2, 3),
    (3, 40, 3, 2, 5),
    (6, 80, 3, 2, 5),
    (6, 96, 2, 1, 3),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
_MOBILENET_V2 = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 32, 3, 2, 3),
    (6, 64, 4, 2, 3),
    (6, 96, 3, 1, 3),
    (6, 160, 3, 2, 3),
    (6, 320, 1, 1, 3),
)


def _stages(inputs: int, stages: tuple[tuple[int, ...], ...], activation: Activation) -> list[nn.Module]:
    layers = []
    for factor, outputs, repeats, stride, size in stages:
        for number in range(repeats):
            step = stride if number == 0 else 1
            layers.append(inverted(inputs, factor * inputs, outputs, size, step, activation))
            inputs = outputs
    return layers


def mnasnet() -> nn.Module:
    """MNASNet-1.0 (Tan et al. 2019)."""
    first = [conv_norm(3, 32, 3, 2), conv_norm(32, 32, 3, groups=32), conv_norm(32, 16, activation=None)]
    return Classifier(nn.Sequential(*first, *_stages(16, _MNASNET, nn.ReLU), conv_norm(320, 1280)), 1280)


def mobilenet_v2() -> nn.Module:
    """MobileNetV2-1.0, with ReLU6."""
    stages = _stages(32, _MOBILENET_V2, nn.ReLU6)
    first, last = conv_norm(3, 32, 3, 2, activation=nn.ReLU6), conv_norm(320, 1280, activation=nn.ReLU6)
    return Classifier(nn.Sequential(first, *stages, last), 1280)


class Shuffled(nn.Module):
    """Half of the channels pass, half are convolved, and they are mixed (Ma et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.is_split = stride == 1
        half = outputs // 2
        self.branch = nn.Sequential(
            conv_norm(half if self.is_split else inputs, half),
            conv_norm(half, half, 3, stride, groups=half, activation=None),
            conv_norm(half, half),
        )
        self.other = nn.Identity()
        if not self.is_split:
            self.other = nn.Sequential(
                conv_norm(inputs, inputs, 3, stride, groups=inputs, activation=None), conv_norm(inputs, half)
            )

    def forward(self, x: Tensor) -> Tensor:
        passed, convolved = x.chunk(2, 1) if self.is_split else (x, x)
        mixed = torch.cat((self.other(passed), self.branch(convolved)), 1)
        return mixed.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def shufflenet_v2() -> nn.Module:
    """ShuffleNetV2-1.0."""
    layers, inputs = [conv_norm(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)], 24
    for outputs, repeats in ((116, 4), (232, 8), (464, 4)):
        for number in range(repeats):
            layers.append(Shuffled(inputs, outputs, 2 if number == 0 else 1))
            inputs = outputs
    return Classifier(nn.Sequential(*layers, conv_norm(464, 1024)), 1024)


class Ghost(nn.Module):
    """Half of the outputs by a convolution, half by a cheap one of these (Han et al. 2020)."""

    def __init__(self, inputs: int, outputs: int, activation: Activation):
        super().__init__()
        half = outputs // 2
        self.primary = conv_norm(inputs, half, activation=activation)
        self.cheap = conv_norm(half, outputs - half, 3, groups=half, activation=activation)

    def forward(self, x: Tensor) -> Tensor:
        made = self.primary(x)
        return torch.cat((made, self.cheap(made)), 1)


# Size, width, outputs, squeezed, stride.
_GHOSTNET = (
    (3, 16, 16, 0, 1), (3, 48, 24, 0, 2), (3, 72, 24, 0, 1), (5, 72, 40, 20, 2), (5, 120, 40, 32, 1),
    (3, 240, 80, 0, 2), (3, 200, 80, 0, 1), (3, 184, 80, 0, 1), (3, 184, 80, 0, 1), (3, 480, 112, 120, 1),
    (3, 672, 112, 168, 1), (5, 672, 160, 168, 2), (5, 960, 160, 0, 1), (5, 960, 160, 240, 1),
    (5, 960, 160, 0, 1), (5, 960, 160, 240, 1),
)  # fmt: skip


def _ghost_block(inputs: int, size: int, width: int, outputs: int, squeezed: int, stride: int) -> nn.Module:
    layers: list[nn.Module] = [Ghost(inputs, width, nn.ReLU)]
    if stride == 2:
        layers.append(conv_norm(width, width, size, 2, groups=width, activation=None))
    if squeezed:
        layers.append(SqueezeExcite(width, squeezed))
    branch = nn.Sequential(*layers, Ghost(width, outputs, None))
    if stride == 1 and inputs == outputs:
        return Residual(branch)
    depthwise = conv_norm(inputs, inputs, size, stride, groups=inputs, activation=None)
    return Residual(branch, nn.Sequential(depthwise, conv_norm(inputs, outputs, activation=None)))


def ghostnet() -> nn.Module:
    """GhostNet-1.0."""
    layers, inputs = [conv_norm(3, 16, 3, 2)], 16
    for size, width, outputs, squeezed, stride in _GHOSTNET:
        layers.append(_ghost_block(inputs, size, width, outputs, squeezed, stride))  # type: ignore[arg-type]
        inputs = outputs
    last = [conv_norm(160, 960), nn.AdaptiveAvgPool2d(1), nn.Conv2d(960, 1280, 1), nn.ReLU()]
    return Classifier(nn.Sequential(*layers, *last), 1280)


class Fire(nn.Module):
    """Few channels, then many by 1 x 1 and by 3 x 3 (Iandola et al. 2016)."""

    def __init__(self, inputs: int, squeezed: int, outputs: int):
        super().__init__()
        self.squeeze, self.activation = nn.Conv2d(inputs, squeezed, 1), nn.ReLU()
        self.one, self.three = nn.Conv2d(squeezed, outputs, 1), nn.Conv2d(squeezed, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.squeeze(x))
        return torch.cat((self.activation(self.one(x)), self.activation(self.three(x))), 1)


def squeezenet() -> nn.Module:
    """SqueezeNet-1.1."""
    fires = [Fire(64, 16, 64), Fire(128, 16, 64), nn.MaxPool2d(3, 2), Fire(128, 32, 128), Fire(256, 32, 128), nn.MaxPool2d(3, 2),
             Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256)]  # fmt: skip
    first = [nn.Conv2d(3, 64, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    features, classifier = (
        nn.Sequential(*first, *fires),
        nn.Sequential(nn.Conv2d(512, 1000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
    )
    return nn.Sequential(features, classifier, nn.Flatten())
