"""Networks for image generation, object detection, recommendation, audio and control."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.suites.nets.blocks import Residual, conv_norm, leaky


def dcgan() -> nn.Module:
    """The generator of DCGAN (Radford et al. 2016)."""
    layers: list[nn.Module] = []
    inputs = 100
    for number, outputs in enumerate((512, 256, 128, 64)):
        stride, padding = (1, 0) if number == 0 else (2, 1)
        layers += [
            nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
        inputs = outputs
    return nn.Sequential(*layers, nn.ConvTranspose2d(inputs, 3, 4, 2, 1, bias=False), nn.Tanh())


def _twice(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(conv_norm(inputs, outputs, 3), conv_norm(outputs, outputs, 3))


class UNet(nn.Module):
    """U-Net with scaling by bilinear interpolation (Ronneberger et al. 2015)."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512, 512)):
        super().__init__()
        self.first = _twice(3, widths[0])
        pairs = list(pairwise(widths))
        self.downs = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), _twice(a, b)) for a, b in pairs)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.ups = nn.ModuleList()
        below = widths[-1]
        for skipped, _ in reversed(pairs):
            made = max(skipped // 2, widths[0])
            self.ups.append(_twice(skipped + below, made))
            below = made
        self.last = nn.Conv2d(widths[0], 2, 1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        held = [self.first(pixel_values)]
        for down in self.downs:
            held.append(down(held[-1]))
        x = held.pop()
        for up in self.ups:
            x = up(torch.cat((held.pop(), self.up(x)), 1))
        return self.last(x)


class YOLOv3(nn.Module):
    """Darknet-53 and heads at three scales, 255 numbers at each place (Redmon and Farhadi 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        inputs, layers = 32, [leaky(3, 32, 3)]
        for outputs, repeats in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
            layers.append(leaky(inputs, outputs, 3, 2))
            for _ in range(repeats):
                branch = nn.Sequential(leaky(outputs, outputs // 2, 1), leaky(outputs // 2, outputs, 3))
                layers.append(Residual(branch))  # type: ignore[arg-type]
            inputs = outputs
            if outputs >= 256:
                self.stages.append(nn.Sequential(*layers))
                layers = []
        self.necks, self.reduces, self.heads = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        extra = 0
        for width in (512, 256, 128):
            neck: list[nn.Module] = [leaky(2 * width + extra, width, 1)]
            for _ in range(2):
                neck += [leaky(width, 2 * width, 3), leaky(2 * width, width, 1)]
            self.necks.append(nn.Sequential(*neck))
            self.heads.append(nn.Sequential(leaky(width, 2 * width, 3), nn.Conv2d(2 * width, 255, 1)))
            self.reduces.append(nn.Sequential(leaky(width, width // 2, 1), nn.Upsample(scale_factor=2)))
            extra = width // 2

    def forward(self, pixel_values: Tensor) -> Tensor:
        maps, x = [], pixel_values
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        x, found = maps.pop(), []
        for neck, reduce, head in zip(self.necks, self.reduces, self.heads, strict=True):
            x = neck(x)
            found.append(head(x).flatten(2))
            if maps:
                x = torch.cat((reduce(x), maps.pop()), 1)
        return torch.cat(found, 2).transpose(1, 2)


def _mlp(*widths: int, last: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    layers[-1] = last()
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """Numbers and 26 categories, and the products of each two of them (Naumov et al. 2019)."""

    def __init__(self, tables: int = 26, rows: int = 20_000, features: int = 64):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, features, mode="sum") for _ in range(tables))
        self.bottom = _mlp(13, 512, 256, features)
        self.top = _mlp(features + (tables + 1) * tables // 2, 512, 256, 1, last=nn.Sigmoid)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """dense [B, 13], sparse int64 [B, tables, indices] -> [B, 1]."""
        x = self.bottom(dense)
        held = torch.stack([x, *(bag(sparse[:, n]) for n, bag in enumerate(self.bags))], 1)
        products = torch.bmm(held, held.transpose(1, 2))
        rows, columns = torch.tril_indices(held.shape[1], held.shape[1], -1)
        return self.top(torch.cat((x, products[:, rows, columns]), 1))


def deep_recommender(items: int = 17_768) -> nn.Module:
    """An autoencoder of ratings, with SELU (Kuchaiev and Ginsburg 2017)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((items, 512), (512, 512), (512, 1024), (1024, 512), (512, 512), (512, items)):
        layers += [nn.Linear(inputs, outputs), nn.SELU()]
    return nn.Sequential(*layers)


def lennard_jones() -> nn.Module:
    """The energy of two atoms, of their distance."""
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def soft_actor() -> nn.Module:
    """The policy of a soft actor-critic (Haarnoja et al. 2018)."""
    return nn.Sequential(nn.Linear(3, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2))


class SpeakerEncoder(nn.Module):
    """Speaker embedding: LSTMs with projections, and the direction of the last output (Wan et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.LSTM(40 if n == 0 else 256, 768, batch_first=True, proj_size=256) for n in range(3)
        )

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.layers:
            features, _ = layer(features)
        return torch.nn.functional.normalize(features[:, -1], dim=1)


class Demucs(nn.Module):
    """Sources of music: strided convolutions of sound, an LSTM, and back, with gates (Defossez et al. 2019)."""

    def __init__(self, channels: int = 64, depth: int = 6):
        super().__init__()
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        inputs, width = 2, channels
        for number in range(depth):
            self.downs.append(
                nn.Sequential(
                    nn.Conv1d(inputs, width, 8, 4), nn.ReLU(), nn.Conv1d(width, 2 * width, 1), nn.GLU(1)
                )
            )
            outputs = inputs if number else 8
            up: list[nn.Module] = [nn.Conv1d(width, 2 * width, 3, padding=1), nn.GLU(1)]
            up.append(nn.ConvTranspose1d(width, outputs, 8, 4))
            self.ups.insert(0, nn.Sequential(*up, *([nn.ReLU()] if number else [])))
            inputs, width = width, 2 * width
        self.lstm = nn.LSTM(inputs, inputs, 2, bidirectional=True)
        self.linear = nn.Linear(2 * inputs, inputs)

    def forward(self, sound: Tensor) -> Tensor:
        """sound [B, 2, samples] -> [B, 8, fewer samples]."""
        held, x = [], sound
        for down in self.downs:
            x = down(x)
            held.append(x)
        x = self.linear(self.lstm(x.permute(2, 0, 1))[0]).permute(1, 2, 0)
        for up in self.ups:
            skip = held.pop()
            start = (skip.shape[-1] - x.shape[-1]) // 2
            x = up(x + skip[..., start : start + x.shape[-1]])
        return x


class Translator(nn.Module):
    """The transformer of its first paper, on features of two sequences (Vaswani et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(512, 8, 6, 6, 2048, batch_first=True)
        self.head = nn.Linear(512, 9521)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.transformer(source, target))
