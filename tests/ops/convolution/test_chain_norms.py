"""Steps of a chain that multiply and shift channels, average windows, or convolve in groups of several channels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.ops.chain.steps import POINTWISE, AffineStep, ConvolutionStep, PoolingStep, Step
from hf_cpu_accel.ops.convolution_chain import bind, convolutions
from hf_cpu_accel.packing.convolution import pack_grouped
from tests.ops.convolution.test_chain_pointwise import both, pixels

ONE, NONE = (1, 1), (0, 0)


def close(image: Tensor, steps: list[Step]) -> None:
    """In float32, and with bfloat16 between steps, also of and to bfloat16."""
    given, expected = both(image, steps)
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-4)
    for input in (image, image.bfloat16()):
        given, expected = both(input, steps, narrow=True)
        assert (given.float() - expected.float()).norm() <= 0.02 * expected.float().norm()


@pytest.mark.parametrize("activation", POINTWISE)
@pytest.mark.parametrize("channels", [1, 8, 19, 64])
def test_norms(channels: int, activation: str, threads: int) -> None:
    gain, shift = torch.randn(channels), torch.randn(channels)
    image = torch.randn(2, channels + 3, 6, 7).contiguous(memory_format=torch.channels_last)[:, :channels]
    norm = AffineStep(0, gain, shift, activation)
    close(image, [norm])
    close(image, [pixels(channels, 24, 0), AffineStep(1, torch.ones(24), torch.zeros(24), activation)])
    expected = POINTWISE[activation](image * gain.view(-1, 1, 1) + shift.view(-1, 1, 1))
    given = convolutions(image, bind([norm], narrow=False))
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("channels", [1, 8, 19, 64])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("size", "stride", "padding"),
    [
        ((2, 2), (2, 2), NONE),
        ((3, 3), ONE, ONE),
        ((3, 2), (2, 1), (1, 0)),
        ((6, 7), ONE, (3, 3)),
        (ONE, (2, 2), NONE),
    ],
)
def test_average_poolings(
    size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    zeros: bool,
    channels: int,
    threads: int,
) -> None:
    image = torch.randn(2, channels, 6, 9)
    pooling = PoolingStep(
        0, channels, size, stride, padding, "average pooling" if zeros else "average pooling within"
    )
    close(image, [pooling])
    given = convolutions(image, bind([pooling], narrow=False))
    expected = functional.avg_pool2d(image, size, stride, padding, count_include_pad=zeros)
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("channels", "group"), [(24, 2), (20, 4), (24, 8), (56, 8), (48, 16), (96, 32), (12, 3), (8, 8), (96, 48)]
)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [(3, 3), (1, 1), (5, 3)])
def test_groups(size: tuple[int, int], stride: int, channels: int, group: int, threads: int) -> None:
    weight, padding = torch.randn(channels, group, *size), (size[0] // 2, size[1] // 2)
    for dilation in (1, 2):
        window = (size, (stride, stride), padding, (dilation, dilation))
        step = ConvolutionStep(pack_grouped(weight), torch.randn(channels), 0, None, *window, "relu")
        for sides in ((9, 16), (5, 40)):
            image = torch.randn(2, channels + 5, *sides).contiguous(memory_format=torch.channels_last)[:, 5:]
            close(image, [step])
            given = convolutions(image, bind([step], narrow=False))
            expected = functional.conv2d(
                image, weight, step.bias, stride, padding, dilation, channels // group
            )
            torch.testing.assert_close(given, expected.relu(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("side", range(1, 18))
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("group", [8, 16])
def test_every_width_of_groups(group: int, stride: int, side: int) -> None:
    convolution = nn.Conv2d(48, 48, 3, stride, 1, groups=48 // group)
    window = ((3, 3), (stride, stride), ONE, ONE)
    step = ConvolutionStep(pack_grouped(convolution.weight), convolution.bias, 0, None, *window, "none")
    image = torch.randn(1, 48, 6, side)
    with torch.no_grad():
        torch.testing.assert_close(
            convolutions(image, bind([step], narrow=False)), convolution(image), atol=1e-4, rtol=1e-4
        )


def test_values_that_are_no_numbers_stay_in_their_channels() -> None:
    image = torch.zeros(1, 32, 5, 5)
    image[0, 9, 2, 2] = torch.nan
    norm = convolutions(image, bind([AffineStep(0, torch.ones(32), torch.ones(32), "relu")], narrow=False))
    assert torch.equal(norm.isnan(), image.isnan())
    step = ConvolutionStep(
        pack_grouped(torch.ones(32, 8, 3, 3)), None, 0, None, (3, 3), ONE, ONE, ONE, "none"
    )
    given = convolutions(image, bind([step], narrow=False))
    assert given[0, 8:16, 1:4, 1:4].isnan().all()
    assert int(given.isnan().sum()) == 8 * 9


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([AffineStep(0, torch.ones(8), torch.ones(8), "none")], "gain of an affine step"),
        ([AffineStep(0, torch.ones(16), torch.ones(8), "none")], "shift of an affine step"),
        ([PoolingStep(0, 8, (2, 2), ONE, NONE, "average pooling")], "pooling has the channels"),
        ([PoolingStep(0, 16, (2, 2), ONE, (2, 2), "average pooling within")], "half a window"),
    ],
)
def test_what_does_not_fit_is_refused(steps: list[Step], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        convolutions(torch.randn(1, 16, 8, 8), bind(steps, narrow=False))
