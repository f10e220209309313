"""Blocks of mobile networks, with channel gates and padding, in one call with the ops around them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.convolution.residual_block import STRUCTURE

WITHIN = {"float32": 1e-4, "bfloat16": 3e-2, "int8": 6e-2}


class Gate(nn.Module):
    def __init__(self, channels: int, squeezed: int, act: nn.Module, gate: nn.Module):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.act, self.gate = act, gate

    def forward(self, image: Tensor) -> Tensor:
        means = image.mean((2, 3), keepdim=True)
        return image * self.gate(self.expand(self.act(self.reduce(means))))


class PooledGate(Gate):
    def forward(self, image: Tensor) -> Tensor:
        scale = functional.adaptive_avg_pool2d(image, 1)
        return self.gate(self.expand(self.act(self.reduce(scale)))) * image


class Inverted(nn.Module):
    def __init__(self, act: type[nn.Module], gate: nn.Module, size: int = 3, stride: int = 1):
        super().__init__()
        self.expand, self.norm1, self.act1 = nn.Conv2d(24, 72, 1, bias=False), nn.BatchNorm2d(72), act()
        self.depthwise = nn.Conv2d(72, 72, size, stride, size // 2, groups=72, bias=False)
        self.norm2, self.act2, self.gate = nn.BatchNorm2d(72), act(), gate
        self.project, self.norm3 = nn.Conv2d(72, 24, 1, bias=False), nn.BatchNorm2d(24)
        self.adds = stride == 1

    def forward(self, image: Tensor) -> Tensor:
        x = self.act1(self.norm1(self.expand(image)))
        x = self.gate(self.act2(self.norm2(self.depthwise(x))))
        x = self.norm3(self.project(x))
        return x + image if self.adds else x


class Padded(nn.Module):
    """With the padding of TensorFlow, or zeros below and to the right."""

    def __init__(self, same: bool, size: int = 3):
        super().__init__()
        self.same, self.size = same, size
        self.first = nn.Conv2d(3, 32, 3, 2)
        self.depthwise, self.norm = nn.Conv2d(32, 32, size, 2, groups=32, bias=False), nn.BatchNorm2d(32)
        self.act, self.last = nn.ReLU6(), nn.Conv2d(32, 16, 1)

    def zeros(self, image: Tensor, size: int) -> Tensor:
        sides = []
        for pixels in reversed(image.shape[2:]):
            total = size - 2 if pixels % 2 == 0 else size - 1
            sides += [total // 2, total - total // 2] if self.same else [size // 2 - 1, size // 2]
        return functional.pad(image, sides, "constant", 0.0)

    def forward(self, image: Tensor) -> Tensor:
        image = self.act(self.first(self.zeros(image, 3)))
        return self.last(self.act(self.norm(self.depthwise(self.zeros(image, self.size)))))


GATES = {
    "hard": lambda: Gate(72, 24, nn.ReLU(), nn.Hardsigmoid()),
    "soft": lambda: PooledGate(72, 8, nn.SiLU(), nn.Sigmoid()),
    "in place": lambda: Gate(72, 20, nn.ReLU(inplace=True), nn.Hardsigmoid(inplace=True)),
    "none": nn.Identity,
}


def of(*blocks: nn.Module) -> nn.Module:
    """A network of these, its norms with statistics of their own."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Sequential(*blocks), nn.Flatten(2)).eval()
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.running_mean, -0.3, 0.3)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return network.requires_grad_(False)


def fused(network: nn.Module) -> list[str]:
    """Return the paths of modules that run as one call."""
    return [item.name for item in explain(network).replaced if item.structure == STRUCTURE]


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def check_one_call(network: nn.Module, images: list[Tensor], dtype: str, *, narrow: bool = False) -> None:
    """That all blocks of the network are one call, and give eager's answers, and that these come back; narrow: also of images in
    bfloat16."""
    images[1] = images[1].contiguous(memory_format=torch.channels_last)
    expected = [network(image) for image in images]
    accelerate_for_cpu(network, dtype=dtype)
    assert fused(network) == ["0"]
    for image, theirs in zip(images, expected, strict=True):
        assert distance(network(image), theirs) < WITHIN[dtype]
        if narrow:
            assert distance(network(image.bfloat16()), theirs) < 6e-2
    restore(network)
    assert all(torch.equal(network(image), theirs) for image, theirs in zip(images, expected, strict=True))


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU])
@pytest.mark.parametrize("gate", GATES)
def test_a_network_of_blocks_is_one_call(gate: str, act: type[nn.Module], dtype: str, threads: int) -> None:
    network = of(
        Inverted(act, GATES[gate]()), Inverted(act, GATES[gate](), 5, 2), Inverted(act, GATES[gate](), 5)
    )
    images = [torch.randn(1, 24, 28, 28), torch.randn(3, 24, 17, 14), torch.randn(2, 24, 5, 3)]
    check_one_call(network, images, dtype, narrow=True)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("same", [False, True])
def test_zeros_that_the_module_puts_around_images(same: bool, size: int) -> None:
    network = of(Padded(same, size))
    sizes = ((32, 32), (33, 31), (20, 18), (25, 40))
    images = [torch.randn(2, 3, *sides) for sides in sizes]
    expected = [network(image) for image in images]
    accelerate_for_cpu(network, dtype="float32")
    assert fused(network) == ["0"]
    for image, theirs in zip(images, expected, strict=True):
        torch.testing.assert_close(network(image), theirs, atol=1e-4, rtol=1e-4)


def test_hooks_and_exchanged_modules_inside_are_seen() -> None:
    network = of(Inverted(nn.ReLU, GATES["hard"]()))
    block, image = network[0][0], torch.randn(1, 24, 9, 9)
    expected = network(image)
    accelerate_for_cpu(network, dtype="float32")
    block = network[0][0]
    seen: list[Tensor] = []
    hook = block.gate.expand.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    torch.testing.assert_close(network(image), expected, atol=1e-4, rtol=1e-4)
    assert [tuple(tensor.shape) for tensor in seen] == [(1, 72, 1, 1)]
    hook.remove()
    block.gate.gate = nn.Identity()
    moved = network(image)
    assert distance(moved, expected) > 1e-3
    block.gate.gate = nn.Hardsigmoid()
    torch.testing.assert_close(network(image), expected, atol=1e-4, rtol=1e-4)
    block.adds = False
    torch.testing.assert_close(network(image), expected - image.flatten(2), atol=1e-4, rtol=1e-4)


def test_copies_and_pickles() -> None:
    network, image = of(Inverted(nn.SiLU, GATES["soft"]())), torch.randn(1, 24, 9, 9)
    accelerate_for_cpu(network, dtype="float32")
    expected = network(image)
    assert torch.equal(copy.deepcopy(network)(image), expected)
    assert torch.equal(pickle.loads(pickle.dumps(network))(image), expected)


class Otherwise(Inverted):
    """Operations that no step of a chain supports."""

    def __init__(self, what: str):
        super().__init__(nn.ReLU, nn.Identity())
        self.what = what

    def forward(self, image: Tensor) -> Tensor:
        x = self.act1(self.norm1(self.expand(image)))
        x = self.act2(self.norm2(self.depthwise(x)))
        if self.what == "gate of places":
            x = x * x.mean(1, keepdim=True)
        elif self.what == "factor":
            x = x * 0.5
        elif self.what == "means of rows":
            x = x * x.mean((3,), keepdim=True)
        elif self.what == "written to":
            x[:, :1] = 0
        elif self.what == "ones around":
            x = functional.pad(x, (1, 1, 1, 1), "constant", 1.0)
        elif self.what == "weighted sum":
            x = torch.add(x, x.relu(), alpha=2)
        return self.norm3(self.project(x))


@pytest.mark.parametrize(
    "what", ["gate of places", "factor", "means of rows", "written to", "ones around", "weighted sum"]
)
def test_what_else_a_module_does_is_done(what: str) -> None:
    network, image = of(Otherwise(what)), torch.randn(2, 24, 12, 11)
    expected = network(image)
    accelerate_for_cpu(network, dtype="float32")
    assert fused(network) == []
    torch.testing.assert_close(network(image), expected, atol=1e-4, rtol=1e-4)


class Written(nn.Module):
    """Writes to its input before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.Conv2d(24, 32, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.two(self.one(image.relu_()))


def test_an_image_that_is_written_to_is_still_written_to() -> None:
    network, image = of(Written()), torch.randn(1, 24, 8, 8)
    written = image.clone()
    expected = network(written)
    accelerate_for_cpu(network, dtype="float32")
    given = image.clone()
    torch.testing.assert_close(network(given), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(given, written)


class Projection(nn.Module):
    """Takes two images, so that nothing can be seen of it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(48, 24, 1, bias=False), nn.BatchNorm2d(24)

    def forward(self, before: Tensor, image: Tensor) -> Tensor:
        return self.norm(self.convolution(image)) + before


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm, self.act = nn.Conv2d(24, 48, 1, bias=False), nn.BatchNorm2d(48), nn.SiLU()
        self.projection = Projection()

    def forward(self, image: Tensor) -> Tensor:
        return self.projection(image, self.act(self.norm(self.expand(image))))


def test_norms_of_modules_that_take_two_images_are_folded() -> None:
    network, image = nn.Sequential(of(Projected()), nn.Identity()).eval(), torch.randn(1, 24, 8, 8)
    expected = network(image)
    accelerate_for_cpu(network, dtype="float32")
    folded = [item.name for item in explain(network).replaced if item.structure == "batch norm, folded"]
    assert "0.0.0.projection.norm" in folded
    torch.testing.assert_close(network(image), expected, atol=1e-4, rtol=1e-4)
