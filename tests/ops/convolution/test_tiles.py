"""conv2d by tiles of the image (winograd.py) against float64 and its own reference, over shapes, layouts and thread counts."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from hf_cpu_accel.ops.convolution import conv2d, conv2d_reference
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.convolution import pack_conv2d
from hf_cpu_accel.packing.linear import PackedWeight
from tests.ops.convolution.test_convolution import Case

# Error of the output over its spread, as root mean squares, against the weights that were given. Patches of the image have 2.4e-3
# in bfloat16 and 1.0e-2 in int8.
BOUND = {"float32": 2e-6, "bfloat16": 5e-3, "int8": 2e-2}
# Of the largest value, between kernel and reference: where a value lies between two steps, they may round it differently.
ALIKE = {"float32": 5e-6, "bfloat16": 1e-2, "int8": 1e-2}

CASES = [
    Case(channels=32),
    Case(channels=64, height=8, width=8, out_channels=64),
    Case(channels=96, height=7, width=10, padding=(0, 0)),
    Case(channels=32, height=3, width=3, padding=(0, 0)),  # a single pixel
    Case(channels=32, height=1, width=1),
    Case(channels=32, height=2, width=5, padding=(2, 0), batch=3),
    Case(channels=64, height=5, width=4, padding=(3, 4)),  # tiles that see nothing but zeros
    Case(batch=1, channels=64, height=40, width=41, out_channels=33),  # blocks of tiles for each thread
    Case(batch=3, channels=320, height=9, width=9, out_channels=32),
    Case(batch=1, channels=2560, height=4, width=4, out_channels=40),  # the team works on one block together
]
WIDE = [  # for integers
    Case(channels=192, out_channels=200),
    Case(batch=1, channels=256, height=15, width=16, out_channels=192, padding=(0, 1)),
    Case(batch=1, channels=224, height=33, width=32, out_channels=193),
]


def cases(dtype: str) -> list[Case]:
    return WIDE if dtype == "int8" else CASES


def pack(case: Case, dtype: str, generator: torch.Generator | None = None) -> PackedWeight:
    return pack_conv2d(case.weight(generator), dtype, tiled=True)


def check(case: Case, dtype: str, activation: str = "none", residual: bool = False, seed: int = 0) -> None:
    """One convolution against float64 arithmetic; raises AssertionError."""
    g = torch.Generator().manual_seed(seed)
    image, weight, bias = case.image(g), case.weight(g), torch.randn(case.out_channels, generator=g)
    truth = F.conv2d(image.double(), weight.double(), bias.double(), **case.window)
    extra = torch.randn(truth.shape, generator=g) if residual else None
    truth = ACTIVATIONS[activation](truth if extra is None else truth + extra)
    packed = pack_conv2d(weight, dtype, tiled=True)
    got = case.run(image, packed, bias, activation=activation, residual=extra)
    assert got.shape == truth.shape
    assert got.is_contiguous(memory_format=torch.channels_last)
    error = (got - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    assert error <= BOUND[dtype], f"{dtype} {case} {activation}: error {error:.2e}"


def check_tile_convolution(seed: int) -> None:
    """What test_tiers.py runs on every tier."""
    rng = random.Random(seed)
    for dtype in BOUND:
        for case in cases(dtype)[:3]:
            check(case, dtype, activation="silu", residual=True, seed=seed)
        for _ in range(3):
            check(drawn(rng, dtype), dtype, seed=seed)


def drawn(rng: random.Random, dtype: str) -> Case:
    padding = (rng.randint(0, 3), rng.randint(0, 3))
    sides = [rng.randint(max(1, 3 - 2 * zeros), 25) for zeros in padding]
    channels = 32 * rng.randint(6, 10) if dtype == "int8" else 32 * rng.randint(1, 5)
    out_channels = rng.randint(192, 260) if dtype == "int8" else rng.randint(1, 100)
    batch = rng.randint(1, 3)
    return Case(batch, channels, sides[0], sides[1], out_channels, padding=padding)


@pytest.mark.parametrize("dtype", BOUND)
def test_against_float64(dtype: str) -> None:
    for case in cases(dtype):
        check(case, dtype)


@pytest.mark.parametrize("dtype", BOUND)
def test_random_shapes(dtype: str) -> None:
    rng = random.Random(1)
    for seed in range(10 if dtype == "int8" else 40):
        check(drawn(rng, dtype), dtype, seed=seed)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue(activation: str) -> None:
    check(CASES[0], "float32", activation, residual=True)
    check(WIDE[0], "int8", activation, residual=True)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("image_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference(dtype: str, image_dtype: torch.dtype) -> None:
    for case in cases(dtype):
        image, packed, bias = case.image().to(image_dtype), pack(case, dtype), torch.randn(case.out_channels)
        got = case.run(image, packed, bias, activation="relu")
        rows = image.permute(0, 2, 3, 1)
        window = [
            list(case.kernel_size),
            *(list(case.window[name]) for name in ("stride", "padding", "dilation")),
        ]
        expected = conv2d_reference(
            rows, packed.data, packed.scale, bias, None, case.out_channels, *window, "relu"
        ).permute(0, 3, 1, 2)
        assert got.dtype is image_dtype
        rounding = 2**-7 if image_dtype is torch.bfloat16 else 0.0
        largest = expected.float().abs().max()
        limit = ALIKE[dtype] + rounding
        assert (got.float() - expected.float()).abs().max() <= limit * largest.clamp_min(1.0)


@pytest.mark.parametrize("dtype", BOUND)
def test_a_layout_or_the_threads_change_nothing(dtype: str) -> None:
    for case in cases(dtype):
        image, packed = case.image(), pack(case, dtype)
        expected = case.run(image, packed)
        wide = torch.randn(case.batch, case.height, case.width + 2, case.channels + 8)
        wide[:, :, 1:-1, 3:-5] = image.permute(0, 2, 3, 1)
        for same in (
            image.to(memory_format=torch.channels_last),
            wide[:, :, 1:-1, 3:-5].permute(0, 3, 1, 2),
            image.transpose(2, 3).contiguous().transpose(2, 3),
        ):
            assert torch.equal(case.run(same, packed), expected)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1 if threads > 1 else 2)
            assert torch.equal(case.run(image, packed), expected)
        finally:
            torch.set_num_threads(threads)


def test_large_channels_leave_the_others_their_precision() -> None:
    """Integers are rotated, as those of linear layers: a few large channels do not set everyone's step."""
    case = Case(batch=1, channels=256, height=16, width=16, out_channels=256)
    g = torch.Generator().manual_seed(0)
    image, weight = case.image(g), case.weight(g)
    image[:, torch.randperm(256, generator=g)[:5]] *= 50
    truth = F.conv2d(image.double(), weight.double(), **case.window)

    def error(tiled: bool) -> float:
        got = case.run(image, pack_conv2d(weight, "int8", tiled=tiled))
        return float((got - truth).norm() / truth.norm())

    assert error(True) < 0.025 < error(False)


def test_nan_stays_in_the_tiles_that_see_it() -> None:
    case = CASES[0]
    image, packed = case.image(), pack(case, "float32")
    image[0, 3, 4, 4] = torch.nan
    seen = case.run(image, packed).isnan()
    assert seen[0, :, 3:6, 3:6].all()  # all windows that see it
    assert not seen[1].any()
    assert not seen[0, :, :2].any()


def test_no_images() -> None:
    case = CASES[0]
    packed = pack(case, "float32")
    assert case.run(torch.randn(0, 32, 9, 7), packed).shape == (0, 40, 9, 7)


@pytest.mark.parametrize("dtype", BOUND)
def test_other_windows_are_refused(dtype: str) -> None:
    case = cases(dtype)[0]
    image, packed = case.image(), pack(case, dtype)
    for window in ({"stride": (2, 1)}, {"dilation": (1, 2)}, {"kernel_size": (1, 9)}):
        with pytest.raises(
            RuntimeError, match="a weight for tiles needs kernel_size 3, stride 1 and dilation 1"
        ):
            conv2d(image, packed, **{"kernel_size": (3, 3), "padding": (1, 1), **window})


def test_a_weight_that_does_not_fit_is_refused() -> None:
    packed = pack(Case(channels=64), "float32")
    image = torch.randn(1, 9, 9, 32)
    window = [[3, 3], [1, 1], [1, 1], [1, 1]]
    with pytest.raises(RuntimeError, match="for tiles does not fit 32 input and 40 output channels"):
        torch.ops.hf_cpu_accel.conv2d(image, packed.data, None, None, None, 40, *window, "none")
    nothing = torch.empty(2, 4, 4, 0, 32, 1)
    with pytest.raises(RuntimeError, match="has input and output channels"):
        torch.ops.hf_cpu_accel.conv2d(image[..., :0], nothing, None, None, None, 40, *window, "none")
    packed = pack(WIDE[0], "int8")
    image = torch.randn(1, 9, 9, 192)
    with pytest.raises(RuntimeError, match="is float32, bfloat16 or int8"):
        torch.ops.hf_cpu_accel.conv2d(
            image, packed.data.view(torch.uint8), packed.scale, None, None, 200, *window, "none"
        )
    with pytest.raises(RuntimeError, match=r"needs float32 scales and sums \[2, 16, 200\]"):
        torch.ops.hf_cpu_accel.conv2d(
            image, packed.data, packed.scale[:, 0], None, None, 200, *window, "none"
        )
