"""Blocks that concatenate images, split them or shuffle their channels, in one call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from tests.rewrite.convolution.test_mobile_blocks import WITHIN, check_one_call, distance, fused, of


def conv(inputs: int, outputs: int, size: int = 1, groups: int = 1) -> nn.Module:
    layers = (
        nn.Conv2d(inputs, outputs, size, padding=size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    )
    return nn.Sequential(*layers, nn.ReLU())


class Moving(nn.Module):
    """Two branches, and how they are put together."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor], outputs: int = 48) -> None:
        super().__init__()
        self.first, self.one, self.two = conv(24, 48), conv(24, 24), conv(24, 24, 3, 24)
        self.join, self.last = join, conv(outputs, 24)

    def forward(self, image: Tensor) -> Tensor:
        passed, convolved = self.first(image).chunk(2, 1)
        return self.last(self.join(self.one(passed), self.two(convolved)))


def together(one: Tensor, two: Tensor) -> Tensor:
    return torch.cat((one, two), 1)


def shuffled(one: Tensor, two: Tensor) -> Tensor:
    return together(one, two).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def shuffled_by_views(one: Tensor, two: Tensor) -> Tensor:
    batch, channels, height, width = (image := together(one, two)).shape
    image = image.view(batch, 4, channels // 4, height, width)
    return image.permute(0, 2, 1, 3, 4).contiguous().reshape(batch, channels, height, width)


JOINS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "together": (together, 48),
    "shuffled": (shuffled, 48),
    "shuffled by views": (shuffled_by_views, 48),
    "some": (lambda one, two: together(one, two)[:, 5:30], 25),
    "every second": (lambda one, two: together(one, two)[:, ::2], 24),
    "three": (lambda one, two: torch.cat((one, two, one), dim=1), 72),
    "one of three": (lambda one, two: together(one, two).split([10, 20, 18], 1)[1], 20),
    "counted from the end": (lambda one, two: torch.cat((one, two), -3), 48),
}


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("name", JOINS)
def test_a_network_that_moves_channels_is_one_call(name: str, dtype: str, threads: int) -> None:
    join, outputs = JOINS[name]
    network = of(Moving(join, outputs), Moving(join, outputs))
    images = [torch.randn(1, 24, 14, 14), torch.randn(3, 24, 9, 7), torch.randn(2, 24, 1, 1)]
    check_one_call(network, images, dtype)


def turned(one: Tensor, two: Tensor) -> Tensor:
    return (
        together(one, two)
        .unflatten(1, (2, -1))
        .transpose(2, 3)
        .flatten(1, 2)
        .reshape(*one.shape[:1], 48, *one.shape[2:])
    )


def written_to(one: Tensor, two: Tensor) -> Tensor:
    image = together(one, two)
    image.unflatten(1, (2, -1))[:, 0] *= 0.99
    return image


def written_to_a_part(one: Tensor, two: Tensor) -> Tensor:
    image = together(one, two)
    image[:, :24].mul_(0.99)
    return image


def of_rows(one: Tensor, two: Tensor) -> Tensor:
    return torch.cat((one, two), 2)[:, :, : one.shape[2]].repeat(1, 2, 1, 1)


@pytest.mark.parametrize("join", [turned, written_to, written_to_a_part, of_rows])
def test_what_else_is_done_to_images_is_done(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    network, image = of(Moving(join)), torch.randn(2, 24, 8, 8)
    expected = network(image)
    accelerate_for_cpu(network, dtype="float32")
    assert fused(network) == []
    torch.testing.assert_close(network(image), expected, atol=1e-4, rtol=1e-4)


def test_a_part_that_is_written_to_after_another_was_read() -> None:
    def join(one: Tensor, two: Tensor) -> Tensor:
        image = together(one, two)
        left, right = image.chunk(2, 1)
        return torch.cat((left.relu_(), right), 1)

    network, image = of(Moving(join)), torch.randn(2, 24, 8, 8)
    expected = network(image)
    accelerate_for_cpu(network, dtype="float32")
    torch.testing.assert_close(network(image), expected, atol=1e-4, rtol=1e-4)


def test_hooks_and_exchanged_modules_are_seen() -> None:
    network, image = of(Moving(shuffled)), torch.randn(1, 24, 9, 9)
    expected = network(image)
    accelerate_for_cpu(network, dtype="float32")
    block, seen = network[0][0], []
    hook = block.two.register_forward_hook(lambda module, args, output: seen.append(tuple(args[0].shape)))
    torch.testing.assert_close(network(image), expected, atol=1e-4, rtol=1e-4)
    assert seen == [(1, 24, 9, 9)]
    hook.remove()
    block.join = together
    assert distance(network(image), expected) > 1e-2
    block.join = shuffled
    torch.testing.assert_close(network(image), expected, atol=1e-4, rtol=1e-4)


class Intrinsic(nn.Module):
    """Of few channels, others cheaply (Han et al. 2020, arXiv:1911.11907)."""

    def __init__(self) -> None:
        super().__init__()
        self.primary, self.cheap = conv(24, 12), conv(12, 12, 3, 12)

    def forward(self, image: Tensor) -> Tensor:
        made = self.primary(image)
        return torch.cat((made, self.cheap(made)), 1)


@pytest.mark.parametrize("dtype", WITHIN)
def test_convolutions_of_few_channels_join(dtype: str) -> None:
    network, image = of(Intrinsic(), Intrinsic()), torch.randn(2, 24, 10, 9)
    expected = network(image)
    accelerate_for_cpu(network, dtype=dtype)
    assert fused(network) == ["0"]
    assert distance(network(image), expected) < WITHIN[dtype]
