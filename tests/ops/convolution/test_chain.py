"""convolutions against float64 and against its plain-torch reference: chains, dtypes, layouts and thread counts."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from hf_cpu_accel.ops.chain.reference import chain_reference
from hf_cpu_accel.ops.chain.steps import ConvolutionStep, PoolingStep
from hf_cpu_accel.ops.convolution_chain import BoundConvolutions, bind, convolutions
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.convolution import pack_conv2d
from tests.ops.convolution.chain_cases import ALIKE, BOUND, chain, check, check_gated, check_stem, stem, truth


def check_convolutions(seed: int) -> None:
    """What test_tiers.py runs on every tier."""
    for more in range(4):
        check_gated(4 * seed + more)
    for dtype in BOUND:
        check_stem(dtype, seed)
        for channels in (32, 64):
            check(dtype, seed, narrow=dtype != "float32", channels=channels)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("stride", [1, 2])
def test_against_float64(dtype: str, stride: int) -> None:
    for seed in range(6):
        check(dtype, seed, narrow=dtype != "float32", stride=stride)
        check(dtype, seed, narrow=False, stride=stride)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("stride", [1, 2])
def test_channels_that_fill_lines(dtype: str, stride: int) -> None:
    """In int8 each image is quantized once, also where two convolutions read it."""
    for seed in range(6):
        check(dtype, seed, narrow=dtype != "float32", stride=stride, channels=64)


@pytest.mark.parametrize("dtype", BOUND)
def test_poolings_and_orders_of_memory(dtype: str) -> None:
    for seed in range(30):
        check_stem(dtype, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [5, 64, 83])
def test_a_pooling_is_that_of_torch(dtype: torch.dtype, channels: int) -> None:
    """To the bit: zeros around the image are no pixels, and NaN spoils the windows that see it."""
    image = -torch.rand(2, channels, 9, 8).to(dtype)
    image[0, 1, :4] = -torch.inf
    image[1, 2, 2, 4], image[1, 3, 8, 7], image[1, 3, 0, 0] = torch.nan, torch.nan, torch.inf
    for size, stride, padding in (
        ((3, 2), (2, 1), (1, 1)),
        ((3, 3), (1, 1), (0, 1)),
        ((2, 5), (2, 4), (1, 2)),
    ):
        expected = F.max_pool2d(image, size, stride, padding)
        got = convolutions(image, bind([PoolingStep(0, channels, size, stride, padding)], narrow=False))
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
        assert expected.isnan().any()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("narrow", [False, True])
def test_reference_of_poolings(dtype: str, narrow: bool) -> None:
    torch.manual_seed(0)
    bound = bind(stem(dtype, random.Random(1)), narrow=narrow)
    rows = torch.randn(2, 30, 23, 3)
    expected = chain_reference(rows, bound.parts, bound.layout, narrow)
    got = torch.ops.hf_cpu_accel.convolutions(rows, bound.parts, bound.layout, narrow)
    rounding = 2e-2 if narrow else 0.0
    assert (got - expected).abs().max() <= (ALIKE[dtype] + rounding) * expected.abs().max()
    arguments = (rows, bound.parts, bound.layout, narrow)
    torch.library.opcheck(torch.ops.hf_cpu_accel.convolutions.default, arguments)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    check("float32", 1, narrow=False, activation=activation)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("channels", [32, 64])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", BOUND)
def test_reference(dtype: str, input_dtype: torch.dtype, narrow: bool, channels: int, batch: int) -> None:
    bound = bind(chain(dtype, random.Random(0), channels=channels), narrow=narrow)
    rows = torch.randn(batch, 9, 7, channels).to(input_dtype)
    expected = chain_reference(rows, bound.parts, bound.layout, narrow)
    got = torch.ops.hf_cpu_accel.convolutions(rows, bound.parts, bound.layout, narrow)
    assert got.dtype is expected.dtype is input_dtype
    rounding = 0.0 if input_dtype is torch.float32 and not narrow else 2e-2
    tolerance = ALIKE[dtype] + rounding
    assert (got.double() - expected.double()).abs().max() <= tolerance * expected.double().abs().max()


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_the_range_of_an_image_is_that_of_all_its_parts(activation: str) -> None:
    """One image is made by threads that see its range as they go; values on both sides of zero, the last panel cut off."""
    torch.manual_seed(0)
    image = torch.randn(1, 64, 40, 40)
    weights = torch.randn(192, 64, 1, 1) / 8, torch.randn(40, 192, 1, 1) / 14, torch.randn(70, 192, 3, 3) / 41
    window = {"stride": (1, 1), "dilation": (1, 1), "residual": None}
    steps = [
        ConvolutionStep(
            pack_conv2d(weight, "int8"),
            None,
            source,
            kernel_size=weight.shape[2:],
            padding=(weight.shape[2] // 2,) * 2,
            activation=activation,
            **window,
        )
        for weight, source in zip(weights, (0, 1, 1), strict=True)
    ]
    bound, expected = bind(steps, narrow=False), truth(image, steps)
    outputs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outputs.append(convolutions(image, bound))
    assert torch.equal(*outputs)
    assert (outputs[0] - expected).abs().max() <= BOUND["int8"] * 2 * expected.abs().max()


def test_nan_spoils_the_image_that_it_is_in() -> None:
    bound = bind(chain("int8", random.Random(0), channels=64), narrow=True)
    for batch in (1, 2):
        image = torch.randn(batch, 64, 9, 9)
        image[0, 3, 4, 4] = torch.nan
        output = convolutions(image, bound)
        assert output[0].isnan().all()
        assert not output[1:].isnan().any()


def test_the_last_step_is_not_rounded() -> None:
    """Narrow is what passes between the steps, not what comes out of them."""
    bound = bind(chain("bfloat16", random.Random(0)), narrow=True)
    output = convolutions(torch.randn(1, 32, 8, 8), bound)
    assert not torch.equal(output, output.bfloat16().float())


def test_opcheck_and_shapes_in_graphs() -> None:
    bound = bind(chain("float32", random.Random(0), stride=2), narrow=False)
    rows = torch.randn(2, 9, 7, 32)
    arguments = (rows, bound.parts, bound.layout, False)
    torch.library.opcheck(torch.ops.hf_cpu_accel.convolutions.default, arguments)


def test_nothing_in_nothing_out() -> None:
    bound = bind(chain("float32", random.Random(0)), narrow=False)
    assert convolutions(torch.empty(0, 32, 5, 4), bound).shape[0] == 0


def test_bound_is_plain_data() -> None:
    bound = bind(chain("int8", random.Random(0)), narrow=True)
    assert isinstance(bound, BoundConvolutions)
    assert all(type(number) is int for number in bound.layout)
