"""Blocks with grouped convolutions, and with leaky ReLUs, in one call."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.rewrite.convolution.links import CombineLink
from hf_cpu_accel.rewrite.convolution.residual_block import FusedResidualBlock
from tests.rewrite.convolution.test_mobile_blocks import GATES, WITHIN, check_one_call, fused, of


def conv(inputs: int, outputs: int, size: int = 1, act: nn.Module | None = None, **how: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False, **how)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), act or nn.Identity())


class Grouped(nn.Module):
    """A block of a ResNeXt (Xie et al. 2017, arXiv:1611.05431) or, gated, of a RegNetY (Radosavovic et al. 2020,
    arXiv:2003.13678)."""

    def __init__(self, group: int, gate: str = "none", stride: int = 1, width: int = 72) -> None:
        super().__init__()
        act = nn.ReLU()
        grouped = conv(width, width, 3, act, stride=stride, groups=width // group)
        self.branch = nn.Sequential(conv(24, width, act=act), grouped, GATES[gate](), conv(width, 24))
        self.shortcut = conv(24, 24, stride=stride) if stride > 1 else nn.Identity()

    def forward(self, image: Tensor) -> Tensor:
        return torch.relu(self.branch(image) + self.shortcut(image))


class CrossStage(nn.Module):
    """Part of a stage of a CSPDarknet (Wang et al. 2020, arXiv:1911.11929)."""

    def __init__(self, slope: float = 0.1, inplace: bool = False) -> None:
        super().__init__()
        leaky = partial(nn.LeakyReLU, slope, inplace)
        self.down, self.passed = conv(32, 64, 3, leaky()), conv(64, 64, 1, leaky())
        self.inner = nn.Sequential(conv(64, 32, 1, leaky()), conv(32, 64, 3, leaky()))
        self.join = conv(128, 32, 1, leaky())

    def forward(self, image: Tensor) -> Tensor:
        image = self.down(image)
        return self.join(torch.cat((self.passed(image), image + self.inner(image)), 1))


def check(network: nn.Module, dtype: str, channels: int = 24) -> None:
    images = [torch.randn(batch, channels, *sides) for batch, *sides in ((1, 14, 14), (3, 9, 8), (2, 17, 33))]
    check_one_call(network, images, dtype)


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("group", [2, 4, 8])
@pytest.mark.parametrize("gate", ["none", "soft"])
def test_blocks_with_groups(gate: str, group: int, dtype: str, threads: int) -> None:
    check(of(Grouped(group, gate), Grouped(group, gate, stride=2), Grouped(group, gate)), dtype)


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("group", [16, 32])
def test_wider_groups(group: int, dtype: str) -> None:
    check(of(Grouped(group, width=96), Grouped(group, stride=2, width=96)), dtype)


@pytest.mark.parametrize("group", [9, 12, 24])
def test_groups_of_another_width_are_left_to_torch(group: int) -> None:
    network, image = of(Grouped(group), Grouped(group)), torch.randn(1, 24, 9, 9)
    expected = network(image)
    accelerate_for_cpu(network, dtype="float32")
    assert "0" not in fused(network)
    torch.testing.assert_close(network(image), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize(("slope", "inplace"), [(0.1, False), (0.1, True), (0.01, False)])
def test_blocks_with_leaky_relus(slope: float, inplace: bool, dtype: str) -> None:
    check(of(CrossStage(slope, inplace), CrossStage(slope, inplace)), dtype, channels=32)


def test_leaky_relus_are_their_convolutions() -> None:
    network = of(CrossStage())
    accelerate_for_cpu(network, dtype="float32")
    (block,) = (module for module in network.modules() if isinstance(module, FusedResidualBlock))
    assert [link.activation for link in block._chain if isinstance(link, CombineLink)] == ["none"]


def test_other_slopes_are_left_to_torch() -> None:
    network, image = of(CrossStage(0.3)), torch.randn(1, 32, 9, 9)
    expected = network(image)
    accelerate_for_cpu(network, dtype="float32")
    torch.testing.assert_close(network(image), expected, atol=1e-4, rtol=1e-4)
