"""Steps of a chain that are no products of matrices: depthwise convolutions, means, sums and products of images, and zeros."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.ops.chain.joined import can_be_in_bytes, join
from hf_cpu_accel.ops.chain.reference import chain_reference, output_shape, same_padding
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
from hf_cpu_accel.packing.convolution import pack_conv2d, pack_grouped
from tests.ops.convolution.chain_cases import gated

ONE, NONE = (1, 1), (0, 0)


def pixels(channels: int, outputs: int, source: int, activation: str = "none") -> ConvolutionStep:
    weight = pack_conv2d(torch.randn(outputs, channels, 1, 1) / channels**0.5, "float32")
    return ConvolutionStep(weight, torch.randn(outputs), source, None, ONE, ONE, NONE, ONE, activation)


def depthwise(
    channels: int,
    size: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = ONE,
    padding: tuple[int, int] = NONE,
    dilation: tuple[int, int] = ONE,
    activation: str = "none",
    more: tuple[int, int] = NONE,
    *,
    biased: bool = True,
) -> ConvolutionStep:
    weight, bias = pack_grouped(torch.randn(channels, 1, *size)), torch.randn(channels) if biased else None
    return ConvolutionStep(weight, bias, 0, None, size, stride, padding, dilation, activation, None, more)


def both(image: Tensor, steps: list[Step], narrow: bool = False) -> tuple[Tensor, Tensor]:
    """What the op gives, and the reference."""
    bound = bind(steps, narrow=narrow)
    expected = chain_reference(image.permute(0, 2, 3, 1), bound.parts, bound.layout, narrow).permute(
        0, 3, 1, 2
    )
    given = convolutions(image, bound)
    rows = tuple(image.shape[side] for side in (0, 2, 3, 1))
    batch, *sides, channels = output_shape(rows, bound.layout)
    assert given.shape == expected.shape == (batch, channels, *sides)
    return given, expected


@pytest.mark.parametrize("seed", range(24))
def test_gated_blocks(seed: int, threads: int) -> None:
    """Any windows, sizes and dtypes, on one thread and on several."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    channels, sides = rng.choice([1, 3, 8, 16, 24, 40, 72, 200]), (rng.randint(9, 40), rng.randint(9, 30))
    steps = gated(rng, channels=channels, sides=sides)
    image = torch.randn(rng.choice([1, 1, 3]), channels + 3, *sides)
    if rng.random() < 0.7:  # then pixels are further apart than they have channels
        image = image.contiguous(memory_format=torch.channels_last)
    image = (
        image[:, :channels]
        if rng.random() < 0.5
        else image[:, 3:].contiguous(memory_format=torch.channels_last)
    )
    given, expected = both(image, steps)
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-4)
    given, expected = both(image.bfloat16(), steps, narrow=True)
    assert (given.float() - expected.float()).norm() <= 0.02 * expected.float().norm()


@pytest.mark.parametrize("side", range(1, 18))
@pytest.mark.parametrize("stride", [1, 2])
def test_every_width(side: int, stride: int) -> None:
    """Tiles of outputs that end within a row, or reach beside the image."""
    step = depthwise(20, (5, 5), (stride, stride), (2, 2))
    image = torch.randn(1, 20, 6, side)
    weight = step.weight.data.permute(2, 1, 0).unflatten(2, (5, 5))
    expected = functional.conv2d(image, weight, step.bias, stride, 2, groups=20)
    given = convolutions(image, bind([step], narrow=False))
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("activation", POINTWISE)
@pytest.mark.parametrize("product", [False, True])
def test_two_images(activation: str, product: bool) -> None:
    steps: list[Step] = [
        pixels(24, 24, 0),
        CombineStep(0, 24, 1, product, activation),
        CombineStep(2, 24, None, False, activation),
    ]
    given, expected = both(torch.randn(2, 24, 5, 7), steps)
    torch.testing.assert_close(given, expected, atol=1e-3, rtol=1e-3)


def test_two_images_whose_pixels_are_apart() -> None:
    image = torch.randn(2, 40, 5, 7).contiguous(memory_format=torch.channels_last)[:, :24]
    steps: list[Step] = [
        CombineStep(0, 24, 0, False, "relu"),
        CombineStep(1, 24, 0, True, "none"),
        MeanStep(0, 24),
    ]
    for count in (1, 2, 3):
        given, expected = both(image, steps[:count])
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


def test_means_of_many_pixels_are_those_of_float64() -> None:
    image = 100 + torch.randn(2, 19, 150, 151)
    given = convolutions(image, bind([MeanStep(0, 19)], narrow=False))
    torch.testing.assert_close(given.double(), image.double().mean((2, 3), keepdim=True), atol=1e-4, rtol=0)


def test_not_a_number_stays() -> None:
    image = torch.randn(1, 16, 8, 8)
    image[0, 3, 4, 4] = torch.nan
    given, expected = both(image, [depthwise(16, padding=ONE, activation="relu")])
    assert torch.equal(given.isnan(), expected.isnan())
    assert given.isnan().sum() == 9


@pytest.mark.parametrize("side", [7, 8, 13])
def test_zeros_of_tensorflow(side: int) -> None:
    """Before and behind the image, as many outputs as strides; also around products of matrices."""
    image = torch.randn(1, 3, side, side + 1)
    weight = torch.randn(16, 3, 3, 3)
    step = ConvolutionStep(
        pack_conv2d(weight, "float32"), None, 0, None, (3, 3), (2, 2), NONE, ONE, "none", None, (SAME, SAME)
    )
    given, _ = both(image, [step])
    (top, bottom), (left, right) = (same_padding(pixels, 3, 2, 1) for pixels in (side, side + 1))
    expected = functional.conv2d(functional.pad(image, (left, right, top, bottom)), weight, stride=2)
    assert given.shape[2:] == (-(-side // 2), -(-(side + 1) // 2))
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-4)


def test_a_depthwise_weight_is_that_of_groups() -> None:
    convolution = nn.Conv2d(32, 32, 3, padding=1, groups=32)
    weight = pack_grouped(convolution.weight)
    step = ConvolutionStep(weight, convolution.bias, 0, None, (3, 3), ONE, ONE, ONE, "none")
    image = torch.randn(2, 32, 9, 10)
    with torch.no_grad():
        torch.testing.assert_close(convolutions(image, bind([step], narrow=False)), convolution(image))
    for other in (torch.randn(32, 3, 3, 3), torch.randn(32, 1, 3)):
        with pytest.raises(ValueError, match="channels of a group"):
            pack_grouped(other)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([CombineStep(0, 16, None, True, "none")], "product is one of two images"),
        ([CombineStep(0, 8, None, False, "relu")], "keeps the channels"),
        ([MeanStep(0, 8)], "channels of its input"),
        ([MeanStep(0, 16), CombineStep(1, 16, 0, True, "none")], "one pixel"),
        ([PoolingStep(0, 16, (2, 2), (2, 2), NONE), CombineStep(0, 16, 1, False, "none")], "one pixel"),
        ([depthwise(24)], "weight of groups"),
        ([replace(depthwise(16), residual=0)], "adds nothing"),
        ([depthwise(16, more=(-2, 0))], "must not be negative"),
    ],
    ids=range(8),
)
def test_what_does_not_fit_is_refused(steps: list[Step], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        convolutions(torch.randn(1, 16, 8, 8), bind(steps, narrow=False))


def test_images_that_these_read_and_make_are_not_in_bytes() -> None:
    int8 = pack_conv2d(torch.randn(64, 64, 1, 1), "int8")
    first = ConvolutionStep(int8, None, 0, None, ONE, ONE, NONE, ONE, "none", (-1.0, 1.0))
    last = ConvolutionStep(int8, None, 2, None, ONE, ONE, NONE, ONE, "none")
    assert can_be_in_bytes(
        [first, ConvolutionStep(int8, None, 1, None, ONE, ONE, NONE, ONE, "none"), last], last=False
    )[:2] == [True, True]
    for between in (
        depthwise(64, padding=ONE),
        CombineStep(1, 64, None, False, "relu"),
        MeanStep(1, 64),
        AffineStep(1, torch.ones(64), torch.ones(64), "none"),
        PoolingStep(1, 64, (2, 2), (2, 2), NONE, "average pooling"),
    ):
        moved = [first, type(between)(**{**vars(between), "source": 1}), last]
        assert not any(can_be_in_bytes(moved, last=False))
        joined = join([moved])
        assert isinstance(joined[0], ConvolutionStep)
        assert joined[0].range is None


@pytest.mark.parametrize("channels", [1, 5, 16, 33])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_channels_of_two_images(
    layout: torch.memory_format, narrow: bool, channels: int, threads: int
) -> None:
    """Together, split, and shuffled; of the input, whose pixels may be further apart and of another dtype, and of others."""
    generator = torch.Generator().manual_seed(channels)
    image = torch.randn(2, channels + 3, 5, 7).contiguous(memory_format=layout)[:, :channels]
    both_of, some = channels + 24, max(channels // 2, 1)
    shuffled = tuple(torch.randperm(both_of, generator=generator).tolist())
    steps: list[Step] = [
        pixels(channels, 24, 0),
        ChannelsStep(0, 1, tuple(range(both_of))),
        ChannelsStep(2, None, tuple(range(some, both_of))),
        ChannelsStep(1, 0, shuffled),
        ChannelsStep(4, 4, (*range(0, both_of, 2), both_of, 0, 0)),
        ChannelsStep(0, None, tuple(reversed(range(channels)))),
    ]
    for count in range(1, len(steps) + 1):
        given, expected = both(image, steps[:count], narrow)
        torch.testing.assert_close(
            given, expected, atol=0.03 if narrow else 1e-5, rtol=0.01 if narrow else 1e-5
        )
        given, expected = both(image.bfloat16(), steps[:count], narrow)
        torch.testing.assert_close(given, expected, atol=0.03, rtol=0.02)
    given, _ = both(image, [ChannelsStep(0, 0, (0, channels))])
    assert torch.equal(given, image[:, [0, 0]])


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([ChannelsStep(0, None, (16,))], "no channel 16 of 16"),
        ([ChannelsStep(0, None, (-1,))], "no channel -1"),
        ([MeanStep(0, 16), ChannelsStep(0, 1, (0, 16))], "same size"),
    ],
)
def test_channels_that_there_are_not(steps: list[Step], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        convolutions(torch.randn(1, 16, 4, 4), bind(steps, narrow=False))


def test_channels_are_no_images_in_bytes() -> None:
    weight = pack_conv2d(torch.randn(64, 64, 3, 3), "int8")
    convolution = ConvolutionStep(weight, None, 0, None, (3, 3), ONE, ONE, ONE, "relu", (0.0, 3.0))
    steps: list[Step] = [convolution, replace(convolution, source=0), ChannelsStep(1, 2, tuple(range(64)))]
    assert can_be_in_bytes(steps, last=True) == [False, False, False]
    joined = join([[ChannelsStep(0, None, (0,))], [ChannelsStep(0, 0, (0, 1))]])
    assert joined[1] == ChannelsStep(1, 1, (0, 1))
