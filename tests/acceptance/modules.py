"""Small modules of each kind that is accelerated, and the shapes of what they are called with."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def classifier() -> nn.Module:
    first = (nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    second = (nn.Conv2d(32, 32, 3, 2, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(*first, *second)


def _mobile() -> nn.Module:
    depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
    layers = (nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64), nn.ReLU6(), depthwise, nn.BatchNorm2d(64), nn.ReLU6())
    return nn.Sequential(*layers, nn.Conv2d(64, 32, 1))


def _over_time() -> nn.Module:
    grouped = nn.Conv1d(64, 64, 32, padding=16, groups=4)
    return nn.Sequential(
        nn.Conv1d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv1d(64, 64, 3, dilation=2), grouped
    )


def _transposed() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(32, 32, 2, 2), nn.ReLU(), nn.ConvTranspose2d(32, 32, 4, 2, 1))


def _attended() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 4, 128, batch_first=True), 2)


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64))


Shapes = list[tuple[tuple[int, ...], ...]]  # of the inputs of each call; the first is traced
MODULES: dict[str, tuple[Callable[[], nn.Module], Shapes]] = {
    "linear": (_perceptron, [((2, 64),), ((5, 64),), ((1, 64),)]),
    "linear of sequences": (_perceptron, [((2, 3, 64),), ((5, 9, 64),), ((1, 1, 64),)]),
    "classifier of images": (classifier, [((2, 3, 32, 32),), ((5, 3, 40, 32),), ((1, 3, 33, 47),)]),
    "one image": (lambda: nn.Conv2d(32, 32, 3, padding=1), [((32, 32, 32),), ((32, 40, 33),)]),
    "mobile network": (_mobile, [((2, 32, 8, 8),), ((5, 32, 9, 12),)]),
    "over time": (_over_time, [((2, 64, 20),), ((5, 64, 47),)]),
    "transposed": (_transposed, [((2, 32, 8, 8),), ((5, 32, 9, 12),)]),
    "transposed over time": (lambda: nn.ConvTranspose1d(64, 32, 4, 2, 1), [((2, 64, 8),), ((5, 64, 12),)]),
    "group norm": (
        lambda: nn.Sequential(nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1)),
        [((2, 32, 8, 8),), ((5, 32, 9, 12),)],
    ),
    "encoder layers": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2),
        [((2, 9, 64),), ((5, 12, 64),)],
    ),
    "decoder layers": (_attended, [((2, 5, 64), (2, 9, 64)), ((3, 6, 64), (3, 10, 64))]),
    "attention": (
        lambda: nn.MultiheadAttention(64, 4, batch_first=True),
        [((2, 9, 64),) * 3, ((3, 12, 64),) * 3],
    ),
    "recurrent": (lambda: nn.LSTM(128, 128, batch_first=True), [((2, 9, 128),), ((3, 12, 128),)]),
}
