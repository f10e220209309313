"""convolutions against float64 and against its plain-torch reference: chains, dtypes, layouts and thread counts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel import extension
from hf_cpu_accel.ops.convolutions import (
    BoundConvolutions,
    ConvolutionStep,
    PoolingStep,
    _reference,
    bind,
    convolutions,
)
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.convolution import pack_conv2d, takes_tiles, unpack_conv2d

# Of the largest value, after three convolutions on the weights that were packed. What is narrow is rounded to 8 bits once or twice
# more than what the kernels read; integers add a step of their input for every convolution.
BOUND = {"float32": 1e-5, "bfloat16": 3e-2, "int8": 6e-2}
SEVEN_BITS = 1.2e-1  # of int8 on tiers without VNNI
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
    """The colours of photos, a pooling, and convolutions of its output: two of a pixel, one of several."""

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
    seven_bits = dtype == "int8" and extension.status().tier in ("avx2", "avx512")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        got = convolutions(image, bound)
        assert got.dtype is image.dtype
        assert got.is_contiguous(memory_format=torch.channels_last)
        error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1.0))
        assert error <= (SEVEN_BITS if seven_bits else BOUND[dtype]), f"{dtype} {seed} {threads}: {error:.2e}"


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


def check_convolutions(seed: int) -> None:
    """What test_tiers.py runs on every tier."""
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
    """In int8 each image is quantised once, also where two convolutions read it."""
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
    expected = _reference(rows, bound.parts, bound.layout, narrow)
    got = torch.ops.hf_cpu_accel.convolutions(rows, bound.parts, bound.layout, narrow)
    rounding = 2e-2 if narrow else 0.0
    assert (got - expected).abs().max() <= (ALIKE[dtype] + rounding) * expected.abs().max()
    arguments = (rows, bound.parts, bound.layout, narrow)
    torch.library.opcheck(torch.ops.hf_cpu_accel.convolutions.default, arguments)


@pytest.mark.parametrize("change", [{"channels": 63}, {"padding": (2, 0)}, {"kernel_size": (0, 1)}])
def test_poolings_that_do_not_exist(change: dict[str, object]) -> None:
    steps = stem("float32", random.Random(0))
    steps[1] = replace(steps[1], **change)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"pooling has|must be positive"):
        convolutions(torch.randn(1, 3, 20, 20), bind(steps, narrow=False))


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_a_pooling_of_no_pixels_is_refused(size: tuple[int, int]) -> None:
    bound = bind([PoolingStep(0, 64, (2, 2), (2, 2), (1, 1))], narrow=False)
    with pytest.raises(RuntimeError, match="rows and columns"):
        convolutions(torch.randn(1, 64, *size), bound)


def test_too_large_a_padded_image_is_refused() -> None:
    steps = stem("float32", random.Random(0), channels=1)
    far = (1 << 20, 1 << 20)
    wide = replace(steps[0], weight=pack_conv2d(torch.randn(16, 1 << 21, 1, 2), "int8"), kernel_size=(1, 2))
    bound = bind([replace(wide, stride=far, padding=far)], narrow=False)
    with pytest.raises(RuntimeError, match="padded input"):
        convolutions(torch.randn(1, 1 << 21, 1, 1), bound)


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
    expected = _reference(rows, bound.parts, bound.layout, narrow)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": 3}, r"steps\[1\]: source=3"),
        ({"residual": 2}, r"steps\[1\]: residual=2"),
        ({"activation": "cosine"}, "cosine"),
    ],
)
def test_bad_steps(change: dict[str, object], message: str) -> None:
    steps = chain("float32", random.Random(0))
    steps[1] = replace(steps[1], **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        bind(steps, narrow=False)


def test_no_steps() -> None:
    with pytest.raises(ValueError, match="at least one"):
        bind([], narrow=False)


def test_inputs_that_do_not_fit() -> None:
    bound = bind(chain("float32", random.Random(0)), narrow=False)
    with pytest.raises(RuntimeError, match="does not fit"):
        convolutions(torch.randn(1, 31, 8, 8), bound)
    with pytest.raises(RuntimeError, match="layout"):
        torch.ops.hf_cpu_accel.convolutions(torch.randn(1, 8, 8, 32), bound.parts, bound.layout[:-1], False)
    steps = chain("float32", random.Random(0))
    wrong = bind([*steps[:3], replace(steps[3], residual=1)], narrow=False)
    with pytest.raises(RuntimeError, match="residual must have"):
        convolutions(torch.randn(1, 32, 8, 8), wrong)


def test_bound_is_plain_data() -> None:
    bound = bind(chain("int8", random.Random(0)), narrow=True)
    assert isinstance(bound, BoundConvolutions)
    assert all(type(number) is int for number in bound.layout)
