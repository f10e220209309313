"""conv2d against float64, over shapes, dtypes, windows, layouts and thread counts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.ops.convolution import conv2d, conv2d_reference
from hf_cpu_accel.ops.linear import ACTIVATIONS, INPUT_STEPS
from hf_cpu_accel.packing.convolution import pack_conv2d, unpack_conv2d
from hf_cpu_accel.packing.linear import PackedWeight
from tests.ops.linear_cases import BOUND, CONVOLUTION_DTYPES

Pair = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A convolution: [batch, channels, height, width] to `out_channels`, by a window."""

    batch: int = 2
    channels: int = 16
    height: int = 9
    width: int = 7
    out_channels: int = 40
    kernel_size: Pair = (3, 3)
    stride: Pair = (1, 1)
    padding: Pair = (1, 1)
    dilation: Pair = (1, 1)
    window: dict[str, Pair] = field(init=False)

    def __post_init__(self) -> None:
        window = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        object.__setattr__(self, "window", window)

    def image(self, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(self.batch, self.channels, self.height, self.width, generator=generator)

    def weight(self, generator: torch.Generator | None = None) -> Tensor:
        size = (self.out_channels, self.channels, *self.kernel_size)
        return torch.randn(size, generator=generator) / (size[1] * size[2] * size[3]) ** 0.5

    def run(
        self, image: Tensor, packed: PackedWeight, bias: Tensor | None = None, **epilogue: object
    ) -> Tensor:
        return conv2d(image, packed, bias, kernel_size=self.kernel_size, **self.window, **epilogue)


CASES = [
    Case(),
    Case(kernel_size=(1, 1), padding=(0, 0)),
    Case(kernel_size=(1, 1), padding=(1, 0), stride=(2, 1)),
    Case(channels=3, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), height=17, width=20),
    Case(kernel_size=(4, 4), stride=(4, 4), padding=(0, 0), height=16, width=12),
    Case(kernel_size=(3, 2), dilation=(2, 3), padding=(4, 3), stride=(1, 2)),
    Case(channels=1, height=1, width=50, kernel_size=(1, 10), stride=(1, 5), padding=(0, 0)),
    Case(kernel_size=(5, 5), padding=(6, 6), height=2, width=1),
    Case(batch=1, channels=48, height=40, width=40, out_channels=33),  # blocks of rows for each thread
    Case(channels=1000, height=2, width=3, out_channels=24),  # k in parts
    # The channels of a pixel fill whole lines of packed input.
    Case(channels=64),
    Case(channels=128, kernel_size=(1, 1), padding=(0, 0), stride=(2, 2)),
    Case(channels=64, kernel_size=(3, 2), dilation=(2, 3), padding=(4, 3), stride=(1, 2)),
    Case(channels=64, kernel_size=(5, 5), padding=(6, 6), height=2, width=1),
    Case(batch=1, channels=64, height=40, width=40, out_channels=33),
    Case(channels=512, height=3, width=3, out_channels=24),
]


def check(case: Case, dtype: str, activation: str = "none", residual: bool = False, seed: int = 0) -> None:
    """One convolution against float64 arithmetic on the very weights that were packed; raises AssertionError."""
    g = torch.Generator().manual_seed(seed)
    image, weight, bias = case.image(g), case.weight(g), torch.randn(case.out_channels, generator=g)
    packed = pack_conv2d(weight, dtype)
    values = unpack_conv2d(packed, case.kernel_size).double()
    truth = F.conv2d(image.double(), values, bias.double(), **case.window)
    extra = torch.randn(truth.shape, generator=g) if residual else None
    truth = ACTIVATIONS[activation](truth if extra is None else truth + extra)
    got = case.run(image, packed, bias, activation=activation, residual=extra)
    assert got.shape == truth.shape
    assert got.is_contiguous(memory_format=torch.channels_last)
    error = (got - truth).abs().max() / truth.abs().max().clamp_min(1.0)
    # Windows that see less of the image than of the zeros around it are quantized like any other.
    assert error <= BOUND[dtype], f"{dtype} {case} {activation}: error {error:.2e}"


def check_convolution(seed: int) -> None:
    """What test_tiers.py runs on every tier."""
    rng = random.Random(seed)
    for dtype in CONVOLUTION_DTYPES:
        check(rng.choice(CASES[:3]), dtype, activation="silu", residual=True, seed=seed)
        for case in CASES[10:13]:
            check(case, dtype, seed=seed)
            check_bfloat16_image(case, dtype, seed)
    for case in CASES[10:13]:
        check_within_half_a_step(case)
        for _ in range(3):
            check(drawn(rng), dtype, seed=seed)


def drawn(rng: random.Random) -> Case:
    pair = lambda low, high: (rng.randint(low, high), rng.randint(low, high))  # noqa: E731
    case = Case(
        batch=rng.randint(1, 3),
        channels=rng.choice((rng.randint(1, 40), 32, 64)),
        height=rng.randint(1, 20),
        width=rng.randint(1, 20),
        out_channels=rng.randint(1, 70),
        kernel_size=pair(1, 4),
        stride=pair(1, 3),
        padding=pair(0, 3),
        dilation=pair(1, 2),
    )
    reach = [d * (k - 1) + 1 for k, d in zip(case.kernel_size, case.dilation, strict=True)]
    fits = all(
        pixels + 2 * p >= r
        for pixels, p, r in zip((case.height, case.width), case.padding, reach, strict=True)
    )
    return case if fits else drawn(rng)


@pytest.mark.parametrize("dtype", CONVOLUTION_DTYPES)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_against_float64(case: Case, dtype: str) -> None:
    check(case, dtype)


def check_within_half_a_step(case: Case) -> None:
    """int8 images against float64: each value is off by at most half a step of its image's range, and 1 % for float32."""
    g = torch.Generator().manual_seed(0)
    image, packed = (
        10 ** torch.randn(case.batch, 1, 1, 1, generator=g) * case.image(g),
        pack_conv2d(case.weight(g), "int8"),
    )
    values = unpack_conv2d(packed, case.kernel_size).double()
    low, high = image.amin((1, 2, 3)).clamp(max=0), image.amax((1, 2, 3)).clamp(min=0)
    step = (high - low).view(-1, 1, 1, 1).double() / INPUT_STEPS
    limit = F.conv2d(torch.ones_like(image, dtype=torch.float64), values.abs(), **case.window) * 0.505 * step
    off = (case.run(image, packed) - F.conv2d(image.double(), values, **case.window)).abs()
    assert (off <= limit).all(), f"{case}: {(off / limit).max():.3f} of the limit"


@pytest.mark.parametrize("case", CASES[10:], ids=range(len(CASES[10:])))
def test_images_in_8_bits(case: Case) -> None:
    check_within_half_a_step(case)


def test_one_image_does_not_change_another() -> None:
    case = Case(channels=64)
    image, packed = case.image(), pack_conv2d(case.weight(), "int8")
    alone = case.run(image[1:], packed)
    image[0] *= 1000
    assert torch.equal(case.run(image, packed)[1:], alone)
    image[0, 3, 4, 4] = torch.nan
    got = case.run(image, packed)
    assert got[0].isnan().all()
    assert torch.equal(got[1:], alone)
    image[0] = torch.inf
    assert case.run(image, packed)[0].isnan().all()
    image[0] = 0.0
    assert (case.run(image, packed)[0] == 0).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue(activation: str) -> None:
    check(Case(), "float32", activation, residual=True)


def test_random_windows() -> None:
    rng = random.Random(0)
    for seed in range(60):
        check(drawn(rng), "float32", seed=seed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_reference(dtype: str) -> None:
    for case in CASES[:8]:
        image, packed, bias = case.image(), pack_conv2d(case.weight(), dtype), torch.randn(case.out_channels)
        extra = torch.randn_like(case.run(image, packed))
        got = case.run(image, packed, bias, activation="gelu", residual=extra).permute(0, 2, 3, 1)
        window = (list(case.kernel_size), list(case.stride), list(case.padding), list(case.dilation))
        last = (extra.permute(0, 2, 3, 1), case.out_channels, *window, "gelu")
        arguments = (packed.data, packed.scale, bias, *last)
        reference = conv2d_reference(image.permute(0, 2, 3, 1), *arguments)
        assert (got - reference).abs().max() <= BOUND[dtype] * reference.abs().max().clamp_min(1.0)


@pytest.mark.parametrize("channels", [24, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_layouts_and_threads_change_nothing(dtype: str, channels: int) -> None:
    case = Case(channels=channels, height=30, width=31)
    image, packed = case.image(), pack_conv2d(case.weight(), dtype)
    expected = case.run(image, packed)
    wide = torch.randn(2, channels + 16, 30, 31).contiguous(memory_format=torch.channels_last)
    part = wide[:, 8 : 8 + channels]
    part.copy_(image)
    flipped = image.transpose(2, 3).contiguous().transpose(2, 3)
    for layout in (image.contiguous(memory_format=torch.channels_last), part, flipped):
        assert torch.equal(case.run(layout, packed), expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(case.run(image, packed), expected)
    finally:
        torch.set_num_threads(threads)


def check_bfloat16_image(case: Case, dtype: str = "bfloat16", seed: int = 0) -> None:
    """Of the same numbers the same answer as in float32, rounded: how far that is from the truth, `check` tells."""
    g = torch.Generator().manual_seed(seed)
    image, packed = case.image(g).bfloat16(), pack_conv2d(case.weight(g), dtype)
    got = case.run(image, packed)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, case.run(image.float(), packed).bfloat16()), f"{dtype} {case}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_bfloat16_images_stay_so(dtype: str) -> None:
    for case in (CASES[0], CASES[1], *CASES[10:]):
        check_bfloat16_image(case, dtype)


def test_empty_batches() -> None:
    case = Case(batch=0)
    assert case.run(case.image(), pack_conv2d(case.weight(), "float32")).shape == (0, 40, 9, 7)


@pytest.mark.parametrize("channels", [16, 64])
def test_nan_stays_where_windows_see_it(channels: int) -> None:
    case = Case(channels=channels)
    image, packed = case.image(), pack_conv2d(case.weight(), "float32")
    image[0, 3, 4, 4] = torch.nan
    seen = case.run(image, packed).isnan()
    expected = torch.zeros(2, 40, 9, 7, dtype=torch.bool)
    expected[0, :, 3:6, 3:6] = True
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_opcheck(dtype: str) -> None:
    packed = pack_conv2d(torch.randn(20, 8, 3, 3), dtype)
    image, residual = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 3, 20)
    window = ([3, 3], [2, 2], [1, 1], [1, 1])
    arguments = (image, packed.data, packed.scale, torch.randn(20), residual, 20, *window, "relu")
    torch.library.opcheck(torch.ops.hf_cpu_accel.conv2d, arguments)


def test_bad_arguments_are_named() -> None:
    case, packed = Case(), pack_conv2d(torch.randn(20, 16, 3, 3), "float32")
    with pytest.raises(ValueError, match="with 16 channels"):
        case.run(torch.randn(1, 15, 9, 9), packed)
    with pytest.raises(ValueError, match="with 16 channels"):
        case.run(torch.randn(16, 9, 9), packed)
    with pytest.raises(ValueError, match="activation='swoosh'"):
        case.run(case.image(), packed, activation="swoosh")
    with pytest.raises(ValueError, match=r"\[out, in, height, width\]"):
        pack_conv2d(torch.randn(3, 4, 5), "float32")
    with pytest.raises(RuntimeError, match="window is larger"):
        Case(padding=(0, 0)).run(torch.randn(1, 16, 2, 9), packed)
    with pytest.raises(RuntimeError, match="window is larger"):
        Case(padding=(0, 0), stride=(2, 2)).run(torch.randn(1, 16, 2, 9), packed)
    with pytest.raises(RuntimeError, match="residual must be"):
        torch.ops.hf_cpu_accel.conv2d(
            torch.randn(1, 9, 9, 16),
            packed.data,
            None,
            None,
            torch.randn(81, 20),
            20,
            [3, 3],
            [1, 1],
            [1, 1],
            [1, 1],
            "none",
        )
    with pytest.raises(RuntimeError, match="must be positive"):
        Case(stride=(0, 1)).run(case.image(), packed)
    with pytest.raises(RuntimeError, match="must be positive"):
        Case(padding=(-1, 1)).run(case.image(), packed)
    with pytest.raises(RuntimeError, match="residual"):
        case.run(case.image(), packed, residual=torch.randn(2, 20, 8, 7))
    with pytest.raises(RuntimeError, match="bias"):
        case.run(case.image(), packed, torch.randn(19))
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        case.run(case.image().double(), packed)
