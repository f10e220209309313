"""Batch norms before convolutions, and average poolings, in one call with the ops around them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.convolution.links import AffineLink, ChannelsLink, CombineLink, PoolingLink
from hf_cpu_accel.rewrite.convolution.residual_block import FusedResidualBlock
from tests.rewrite.convolution.test_mobile_blocks import WITHIN, distance, fused, of


def ahead(inputs: int, outputs: int, size: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
    return nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), convolution)


class Growing(nn.Module):
    """A dense block (Huang et al. 2016, arXiv:1608.06993), with images concatenated again for each layer."""

    def __init__(self, inputs: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(ahead(inputs + 32 * number, 64), ahead(64, 32, 3)) for number in range(layers)
        )

    def forward(self, image: Tensor) -> Tensor:
        images = [image]
        for layer in self.layers:
            images.append(layer(torch.cat(images, 1)))
        return torch.cat(images, 1)


class PreActivated(nn.Module):
    """A residual block with its norms ahead (He et al. 2016, arXiv:1603.05027)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(ahead(32, 64), ahead(64, 64, 3), ahead(64, 32))

    def forward(self, image: Tensor) -> Tensor:
        return image + self.branch(image)


class ThreeWays(nn.Module):
    """Convolutions and a norm of the input, added up (Ding et al. 2021, arXiv:2101.03697)."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.one = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 1)
        self.of_three, self.of_one, self.same = (nn.BatchNorm2d(32) for _ in range(3))

    def forward(self, image: Tensor) -> Tensor:
        sums = self.of_three(self.three(image)) + self.of_one(self.one(image))
        return torch.relu(sums + self.same(image))


class Transition(nn.Module):
    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.all = nn.Sequential(ahead(32, 64), pool, ahead(64, 32, 3), nn.BatchNorm2d(32), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        return self.all(image)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "growing": Growing,
    "ahead": PreActivated,
    "three ways": ThreeWays,
    "halved": lambda: Transition(nn.AvgPool2d(2)),
    "zeros counted": lambda: Transition(nn.AvgPool2d(3, 1, 1)),
    "zeros not counted": lambda: Transition(nn.AvgPool2d((3, 2), (2, 1), (1, 0), count_include_pad=False)),
    "largest": lambda: Transition(nn.MaxPool2d(2)),
    "no gain": lambda: nn.Sequential(nn.BatchNorm2d(32, affine=False), nn.Conv2d(32, 32, 3), ThreeWays()),
}


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_one_call(name: str, dtype: str, threads: int) -> None:
    network = of(
        NETWORKS[name](), NETWORKS[name]() if name not in ("growing", "halved", "largest") else nn.Identity()
    )
    images = [torch.randn(1, 32, 14, 14), torch.randn(3, 32, 9, 8)]
    images[1] = images[1].contiguous(memory_format=torch.channels_last)
    expected = [network(image) for image in images]
    accelerate_for_cpu(network, dtype=dtype)
    assert fused(network) == ["0"]
    for image, theirs in zip(images, expected, strict=True):
        before = image.clone()
        assert distance(network(image), theirs) < WITHIN[dtype]
        assert torch.equal(image, before)
    other = pickle.loads(pickle.dumps(copy.deepcopy(network)))
    assert torch.equal(other(images[0]), network(images[0]))
    restore(network)
    assert all(torch.equal(network(image), theirs) for image, theirs in zip(images, expected, strict=True))


def chain_in(network: nn.Module) -> list[type]:
    (block,) = (module for module in network.modules() if isinstance(module, FusedResidualBlock))
    return [type(link) for link in block._chain]


def test_what_a_growing_list_has_in_common_is_put_together_once() -> None:
    network = of(Growing(layers=4))
    accelerate_for_cpu(network, dtype="float32")
    assert chain_in(network).count(ChannelsLink) == 4
    assert chain_in(network).count(AffineLink) == 8
    assert CombineLink not in chain_in(network)  # each activation is its norm's


def test_the_plan_tells_of_norms_once() -> None:
    network = of(PreActivated())
    accelerate_for_cpu(network, dtype="float32")
    rows = [item for item in explain(network).items if item.structure in ("batch norm", "BatchNorm2d")]
    assert [(row.name, row.op, row.reason) for row in rows] == [
        (f"0.0.branch.{number}.0", "convolutions", None) for number in range(3)
    ]


def test_a_sum_and_its_activation_are_one_step() -> None:
    network = of(ThreeWays())
    accelerate_for_cpu(network, dtype="float32")
    assert chain_in(network).count(CombineLink) == 1


def test_an_activation_whose_input_is_read_again_stays_a_step() -> None:
    class Twice(PreActivated):
        def forward(self, image: Tensor) -> Tensor:
            norm = self.branch[0][0](image)
            return self.branch[0][2](torch.relu(norm)) + self.branch[0][2](norm)

    network, image = of(Twice()), torch.randn(2, 32, 9, 9)
    expected = network(image)
    accelerate_for_cpu(network, dtype="float32")
    torch.testing.assert_close(network(image), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_a_norm_that_is_written_to_is_followed(name: str) -> None:
    network, image = of(PreActivated()), torch.randn(1, 32, 9, 9)
    accelerate_for_cpu(network, dtype="float32")
    before = network(image)
    with torch.no_grad():
        getattr(network[0][0].branch[0][0], name).add_(0.5)
        after = network(image)
        restore(network)
        expected = network(image)
    assert distance(after, expected) < 1e-4
    assert distance(after, before) > 1e-2


def test_another_epsilon_and_a_norm_of_the_batch_are_seen() -> None:
    network, image = of(PreActivated()), torch.randn(4, 32, 9, 9)
    accelerate_for_cpu(network, dtype="float32")
    before = network(image)
    norm = network[0][0].branch[0][0]
    norm.eps = 2.0
    assert distance(network(image), before) > 1e-2
    norm.eps = 1e-5
    assert torch.equal(network(image), before)


@pytest.mark.parametrize(
    "pool",
    [nn.AvgPool2d(2, ceil_mode=True), nn.AvgPool2d(2, divisor_override=3), nn.LPPool2d(2, 2)],
)
def test_other_poolings_are_left(pool: nn.Module) -> None:
    network, image = of(Transition(pool)), torch.randn(1, 32, 9, 9)
    expected = network(image)
    accelerate_for_cpu(network, dtype="float32")
    assert not any(
        isinstance(m, FusedResidualBlock) and PoolingLink in map(type, m._chain) for m in network.modules()
    )
    torch.testing.assert_close(network(image), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", WITHIN)
def test_a_network_that_takes_no_small_image_is_read_on_a_larger_one(dtype: str) -> None:
    network = of(*(Transition(nn.AvgPool2d(2)) for _ in range(4)))
    images = [torch.randn(1, 32, 16, 17), torch.randn(2, 32, 40, 33)]
    expected = [network(image) for image in images]
    accelerate_for_cpu(network, dtype=dtype)
    assert fused(network) == ["0"]
    for image, theirs in zip(images, expected, strict=True):
        assert distance(network(image), theirs) < 2 * WITHIN[dtype]
    with pytest.raises(RuntimeError):
        network(torch.randn(1, 32, 9, 9))
