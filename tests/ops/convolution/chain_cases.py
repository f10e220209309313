"""Chains of convolutions, their truth in float64, and how far results may be from it."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.ops.chain.reference import chain_reference
from hf_cpu_accel.ops.chain.steps import (
    POINTWISE,
    SAME,
    AffineStep,
    ChannelsStep,
    CombineStep,
    ConvolutionStep,
    MeanStep,
    PoolingStep,
    Step,
)
from hf_cpu_accel.ops.convolution_chain import bind, convolutions
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.convolution import pack_conv2d, pack_grouped, takes_tiles, unpack_conv2d

# Of the largest value, after three convolutions on the weights that were packed. What is narrow is rounded to 8 bits once or twice
# more than what the kernels read; integers add a step of their input for every convolution.
BOUND = {"float32": 1e-5, "bfloat16": 3e-2, "int8": 6e-2}
# Between kernel and reference, which round alike: one step where a value lies between two.
ALIKE = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 4e-2}


def chain(
    dtype: str, rng: random.Random, *, channels: int = 32, activation: str = "relu", stride: int = 1
) -> list[ConvolutionStep]:
    """A bottleneck with a shortcut that is a convolution, too."""

    def step(
        source: int, residual: int | None, sizes: tuple[int, int], size: int, **window: int
    ) -> ConvolutionStep:
        out, inputs = sizes
        weight = torch.randn(out, inputs, size, size) / (inputs * size * size) ** 0.5
        moves = {name: (value, value) for name, value in window.items()}
        turns = {name: moves.get(name, (1, 1)) for name in ("stride", "dilation")}
        padding = (size // 2 * moves.get("dilation", (1, 1))[0],) * 2
        return ConvolutionStep(
            weight=pack_conv2d(weight, dtype, tiled=takes_tiles(weight.shape, dtype, **turns)),
            bias=0.1 * torch.randn(out) if rng.random() < 0.8 else None,
            source=source,
            residual=residual,
            kernel_size=(size, size),
            stride=moves.get("stride", (1, 1)),
            padding=padding,
            dilation=moves.get("dilation", (1, 1)),
            activation=activation,
        )

    inner, out = (64, 128) if channels % 64 == 0 else rng.choice(((16, 48), (24, 70), (32, 64)))
    return [
        step(0, None, (inner, channels), 1),
        step(1, None, (inner, inner), 3, stride=stride, dilation=rng.choice((1, 2))),
        replace(step(0, None, (out, channels), 1, stride=stride), activation="none"),
        step(2, 3, (out, inner), 1),
    ]


def stem(
    dtype: str, rng: random.Random, *, channels: int = 3, padding: int = 1
) -> list[ConvolutionStep | PoolingStep]:
    """The colors of photos, a pooling, and convolutions of its output: two of a pixel, one of several."""

    def step(source: int, weight: Tensor, dtype: str, stride: int = 1) -> ConvolutionStep:
        size = tuple(weight.shape[2:])
        return ConvolutionStep(
            weight=pack_conv2d(weight / weight[0].numel() ** 0.5, dtype),
            bias=torch.randn(weight.shape[0]),
            source=source,
            residual=None,
            kernel_size=size,
            stride=(stride, stride),
            padding=tuple(side // 2 for side in size),
            dilation=(1, 1),
            activation=rng.choice(("relu", "none")),
        )

    wide = "float32" if dtype == "float32" else "bfloat16"
    size, sides = (rng.randint(2, 7), rng.randint(2, 7)), (rng.randint(2, 3), rng.randint(2, 4))
    moves = (rng.randint(1, 2), rng.randint(1, 3))
    last = step(2, torch.randn(70, 64, 3, 3), dtype)
    return [
        step(0, torch.randn(64, channels, *size), wide, stride=rng.randint(1, 2)),
        PoolingStep(1, 64, sides, moves, (padding, padding)),
        step(2, torch.randn(70, 64, 1, 1), dtype),
        replace(last, residual=3),
    ]


def gated(rng: random.Random, *, channels: int, sides: tuple[int, int]) -> list[Step]:
    """A convolution in groups, a gate of its channels, perhaps others of them, a product of matrices, a norm and a pooling, for
    images of at least so many pixels."""
    one, none = (1, 1), (0, 0)

    def pixels(outputs: int, source: int, activation: str, channels: int = channels) -> ConvolutionStep:
        weight = pack_conv2d(torch.randn(outputs, channels, 1, 1) / channels**0.5, "float32")
        return ConvolutionStep(weight, torch.randn(outputs), source, None, one, one, none, one, activation)

    size = rng.choice([(3, 3), (5, 5), (7, 7), (9, 9), (3, 5), (2, 2), (1, 1)])
    stride, dilation = rng.choice([one, (2, 2), (1, 2), (3, 3)]), rng.choice([one, one, (2, 1)])
    padding, more = (size[0] // 2, size[1] // 2), rng.choice([none, none, (0, 1), (2, 1)])
    if rng.random() < 0.3:
        padding, more = none, (SAME, SAME)
    if any(side < step * (reach - 1) + 1 for side, step, reach in zip(sides, dilation, size, strict=True)):
        dilation = one
    group = rng.choice([1, 1, *(wide for wide in (2, 3, 4, 8, 16, 40) if channels % wide == 0)])
    weight = pack_grouped(torch.randn(channels, group, *size) / (group * size[0] * size[1]) ** 0.5)
    bias = torch.randn(channels) if rng.random() < 0.7 else None
    activation = rng.choice(["none", "relu", "relu6", "hardswish", "silu", "gelu"])
    window = (size, stride, padding, dilation)
    moved = rng.sample(range(2 * channels), rng.randint(1, 2 * channels))
    moves = rng.random() < 0.4
    outputs, last = rng.choice([5, 16, 40]), 7 if moves else 6
    pooled = rng.choice(["max pooling", "average pooling", "average pooling within"])
    return [
        ConvolutionStep(weight, bias, 0, None, *window, activation, None, more),
        MeanStep(1, channels),
        pixels(channels, 2, "relu"),
        CombineStep(3, channels, None, False, rng.choice(["sigmoid", "hardsigmoid"])),
        CombineStep(1, channels, 4, rng.random() < 0.7, "none"),
        *([ChannelsStep(5, 1, tuple(moved))] if moves else []),
        pixels(outputs, last - 1, "none", len(moved) if moves else channels),
        AffineStep(last, torch.randn(outputs), torch.randn(outputs), rng.choice(list(POINTWISE))),
        PoolingStep(last + 1, outputs, (2, rng.randint(2, 3)), (rng.randint(1, 2), 1), one, pooled),
    ]


def truth(image: Tensor, steps: list[ConvolutionStep | PoolingStep]) -> Tensor:
    images = [image.double()]
    for step in steps:
        if isinstance(step, PoolingStep):
            images.append(F.max_pool2d(images[step.source], step.kernel_size, step.stride, step.padding))
            continue
        weight = unpack_conv2d(step.weight, step.kernel_size).double()
        bias = None if step.bias is None else step.bias.double()
        output = F.conv2d(images[step.source], weight, bias, step.stride, step.padding, step.dilation)
        output = output if step.residual is None else output + images[step.residual]
        images.append(ACTIVATIONS[step.activation](output))
    return images[-1]


def check(dtype: str, seed: int, *, narrow: bool, channels: int = 32, **options: object) -> None:
    """One chain on an image of random size; raises AssertionError."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    steps = chain(dtype, rng, channels=channels, **options)  # type: ignore[arg-type]
    image = torch.randn(rng.randint(1, 3), channels, rng.randint(1, 20), rng.randint(1, 20))
    image = image.contiguous(memory_format=rng.choice((torch.channels_last, torch.contiguous_format)))
    bound, expected = bind(steps, narrow=narrow), truth(image, steps)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        got = convolutions(image, bound)
        assert got.dtype is image.dtype
        assert got.is_contiguous(memory_format=torch.channels_last)
        error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1.0))
        assert error <= BOUND[dtype], f"{dtype} {seed} {threads}: {error:.2e}"


def check_stem(dtype: str, seed: int) -> None:
    """The same with a pooling, and an image that may lie in any order."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    channels = rng.choice((1, 3, 4, 5, 19))
    steps = stem(dtype, rng, channels=channels, padding=rng.randint(0, 1))
    image = torch.randn(rng.randint(1, 2), channels, rng.randint(7, 40), rng.randint(9, 40))
    order = rng.choice(("channels_last", "contiguous", "every second", "turned", "one"))
    if order == "channels_last":
        image = image.contiguous(memory_format=torch.channels_last)
    elif order == "every second":
        image = image[..., 1::2] if image.shape[-1] > 20 else image[..., 1:]
    elif order == "turned":
        image = image.transpose(2, 3)
    elif order == "one":
        image = image[:, :1].expand(-1, channels, -1, -1)
    bound, expected = bind(steps, narrow=dtype != "float32"), truth(image, steps)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        got = convolutions(image, bound)
        error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1.0))
        assert error <= BOUND[dtype], f"{dtype} {seed} {threads} {order}: {error:.2e}"


def check_gated(seed: int) -> None:
    """A block that has no products of matrices but its last, of any number of channels."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    channels, sides = rng.choice([8, 24, 40, 56, 80, 200]), (rng.randint(9, 20), rng.randint(9, 30))
    steps, image = gated(rng, channels=channels, sides=sides), torch.randn(1, *sides, channels)
    bound = bind(steps, narrow=False)
    expected = chain_reference(image, bound.parts, bound.layout, narrow=False).permute(0, 3, 1, 2)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        given = convolutions(image.permute(0, 3, 1, 2), bound)
        error = float((given - expected).abs().max() / expected.abs().max().clamp_min(1.0))
        assert error <= ALIKE["float32"], f"{seed} {threads}: {error:.2e}"
