"""Images that pass in 8 bits between convolutions: against float64 and the plain-torch reference, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_cpu_accel import extension
from hf_cpu_accel.ops.chain.joined import join
from hf_cpu_accel.ops.chain.reference import chain_reference
from hf_cpu_accel.ops.chain.steps import ConvolutionStep, PoolingStep
from hf_cpu_accel.ops.convolution_chain import bind, convolutions
from hf_cpu_accel.packing.convolution import pack_conv2d
from tests.ops.convolution.chain_cases import truth

Step = ConvolutionStep | PoolingStep


def step(
    source: int,
    sizes: tuple[int, int],
    size: int = 1,
    *,
    residual: int | None = None,
    activation: str = "relu",
    stride: int = 1,
    tiled: bool = False,
    dtype: str = "int8",
) -> ConvolutionStep:
    weight = torch.randn(*sizes, size, size) / (sizes[1] * size * size) ** 0.5
    return ConvolutionStep(
        weight=pack_conv2d(weight, dtype, tiled=tiled),
        bias=0.1 * torch.randn(sizes[0]),
        source=source,
        residual=residual,
        kernel_size=(size, size),
        stride=(stride, stride),
        padding=(size // 2, size // 2),
        dilation=(1, 1),
        activation=activation,
    )


def ranged(steps: list[Step], image: Tensor) -> list[Step]:
    """The steps with the ranges that their images have for this one, but for the last."""
    found: list[Step] = []
    for number, part in enumerate(steps):
        if isinstance(part, ConvolutionStep) and number + 1 < len(steps):
            made = truth(image, steps[: number + 1])
            part = replace(part, range=(min(float(made.min()), 0.0), max(float(made.max()), 0.0)))
        found.append(part)
    return found


def bottleneck(rng: random.Random) -> list[Step]:
    out = rng.choice((70, 128))
    activation = rng.choice(("relu", "relu", "silu", "none"))
    return [
        step(0, (64, 64), activation=activation),
        step(1, (64, 64), 3, stride=rng.randint(1, 2)),
        step(0, (out, 64), activation="none", stride=1),
        step(1, (out, 64), residual=3, activation=activation),
        PoolingStep(2, 64, (3, 3), (2, 2), (1, 1)),
        step(5, (out, 64), activation="none"),
    ]


def tiles(rng: random.Random) -> list[Step]:
    return [
        step(0, (192, 64)),
        step(1, (192, 192), 3, tiled=True),
        step(2, (192, 192), 3, residual=1, tiled=True, activation=rng.choice(("relu", "silu"))),
        step(3, (40, 192), 3),
    ]


def stem(rng: random.Random) -> list[Step]:
    """The first convolution has other weights, and adds to a floating point image."""
    return [
        step(0, (64, 64), 3, dtype="bfloat16"),
        step(0, (64, 64), activation="none", dtype="float32"),
        step(1, (64, 64), residual=2),
        step(3, (128, 64), activation="gelu"),
        step(0, (128, 64), residual=4, dtype="bfloat16"),
    ]


def check(steps: list[Step], image: Tensor) -> None:
    """As the reference, up to a step where a value lies between two, and as close to the truth as 8 bits are."""
    bound, expected = bind(ranged(steps, image), narrow=False), truth(image, steps)
    rows = image.permute(0, 2, 3, 1)
    reference = chain_reference(rows, bound.parts, bound.layout, False).permute(0, 3, 1, 2)
    outputs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outputs.append(convolutions(image, bound))
        error = float((outputs[-1] - expected).norm() / expected.norm())
        assert error <= 0.03, error
        apart = float((outputs[-1] - reference).norm() / reference.norm())
        assert apart <= 1.5e-2, apart
    if extension.status().loaded:  # torch's convolutions, of which the reference is, may add in another order
        assert torch.equal(*outputs)


def check_largest_products(size: int) -> None:
    """Bytes 0 and 255 times weights of the largest magnitude: off by half a step of each image at most."""
    signs = torch.randint(0, 2, (40, 64, size, size)) * 2.0 - 1.0
    signs[0], signs[1] = 1.0, -1.0
    image = torch.randint(0, 2, (1, 64, 9, 8)) * 2.0 - 1.0
    image[..., :4, :], image[..., 4, :] = 1.0, -1.0
    identity = pack_conv2d(torch.eye(64)[..., None, None], "int8")
    steps = [
        replace(step(0, (64, 64), activation="none"), weight=identity, bias=None, range=(-1.0, 1.0)),
        replace(step(1, (40, 64), size, activation="none"), weight=pack_conv2d(signs, "int8"), bias=None),
    ]
    limit = 64 * size * size * 1.02 * (1 / 253 + 1 / 255)
    off = convolutions(image, bind(steps, narrow=False)) - truth(
        image, [replace(steps[0], range=None), steps[1]]
    )
    assert off.abs().max() <= limit, f"{size}: {off.abs().max():.3f}, {limit:.3f} at most"


@pytest.mark.parametrize("size", [1, 3])
def test_largest_products(size: int) -> None:
    check_largest_products(size)


def check_images_in_bytes(seed: int) -> None:
    """What test_tiers.py runs on every tier."""
    for size in (1, 3):
        check_largest_products(size)
    for make in (bottleneck, tiles, stem):
        torch.manual_seed(seed)
        rng = random.Random(seed)
        steps = make(rng)
        check(steps, torch.randn(rng.randint(1, 2), 64, rng.randint(2, 17), rng.randint(2, 17)))


@pytest.mark.parametrize("seed", range(8))
def test_against_float64_and_the_reference(seed: int) -> None:
    check_images_in_bytes(seed)


def test_bytes_are_those_of_the_reference() -> None:
    """One convolution, read back by one that changes nothing: each value is a step of the range, and clamped to it."""
    torch.manual_seed(0)
    one = replace(
        step(1, (64, 64), activation="none"), weight=pack_conv2d(torch.eye(64)[..., None, None], "int8")
    )
    steps = [
        replace(step(0, (64, 64), activation="none"), range=(-0.5, 1.0)),
        replace(one, bias=None),
    ]
    image = torch.randn(1, 64, 6, 5)
    output = convolutions(image, bind(steps, narrow=False))
    width = 1.5 / 255
    assert output.min() >= -0.5 - width
    assert output.max() <= 1.0 + width
    assert (output / width - torch.round(output / width)).abs().max() < 1e-2
    inside = truth(image, [replace(steps[0], range=None)]).clamp(-0.5, 1.0)
    assert (output - inside).abs().max() <= 0.03


def test_an_image_of_zeros() -> None:
    steps = [replace(step(0, (64, 64)), range=(0.0, 0.0)), step(1, (64, 64), activation="none")]
    output = convolutions(torch.randn(1, 64, 4, 4), bind(steps, narrow=False))
    bias = steps[1].bias
    assert bias is not None
    assert torch.equal(output, bias[None, :, None, None].expand_as(output))


@pytest.mark.parametrize(
    ("range", "message"),
    [
        ((0.5, 1.0), "0 between them"),
        ((-1.0, -0.5), "0 between them"),
        ((0.0, float("inf")), "finite"),
        ((float("nan"), 1.0), "finite"),
    ],
)
def test_ranges_that_are_none(range: tuple[float, float], message: str) -> None:
    steps = [replace(step(0, (64, 64)), range=range), step(1, (64, 64))]
    with pytest.raises(RuntimeError, match=message):
        convolutions(torch.randn(1, 64, 4, 4), bind(steps, narrow=False))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([replace(step(0, (64, 64)), range=(0.0, 1.0))], "last step"),
        (
            [replace(step(0, (64, 64)), range=(0.0, 1.0)), step(1, (64, 64), dtype="bfloat16")],
            "weights of images",
        ),
        (
            [replace(step(0, (64, 64)), range=(0.0, 1.0)), PoolingStep(1, 64, (2, 2), (2, 2), (0, 0))],
            "last step",
        ),
    ],
)
def test_who_cannot_have_bytes(steps: list[Step], message: str) -> None:
    image = torch.randn(1, 64, 4, 4)
    with pytest.raises(RuntimeError, match=message):
        convolutions(image, bind(steps, narrow=False))
    joined = join([steps])
    assert all(part.range is None for part in joined if isinstance(part, ConvolutionStep))
    assert convolutions(image, bind(joined, narrow=False)).isfinite().all()


def test_chains_joined_are_chains_one_after_another() -> None:
    torch.manual_seed(0)
    first = [step(0, (64, 64)), PoolingStep(1, 64, (3, 3), (1, 1), (1, 1))]
    second = [step(0, (64, 64), 3), step(1, (64, 64), residual=0)]
    image = torch.randn(1, 64, 9, 8)
    between = convolutions(image, bind(first, narrow=False))
    expected = convolutions(between, bind(second, narrow=False))
    joined = join([first, second])
    assert [part.source for part in joined] == [0, 1, 2, 3]
    torch.testing.assert_close(convolutions(image, bind(joined, narrow=False)), expected)
    kept = join([ranged([*first, second[0]], image)[:2], second])
    assert isinstance(kept[0], ConvolutionStep)
    assert kept[0].range is not None
    error = (convolutions(image, bind(kept, narrow=False)) - expected).norm() / expected.norm()
    assert 0 < float(error) <= 0.03
