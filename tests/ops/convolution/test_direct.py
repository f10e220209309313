"""Convolutions of images in bytes where these lie (AMX): windows of all kinds, borders, batches, and the same integers as on other
tiers."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_cpu_accel.ops.chain.steps import ConvolutionStep, PoolingStep
from hf_cpu_accel.ops.convolution import out_size
from hf_cpu_accel.ops.convolution_chain import bind, convolutions
from hf_cpu_accel.packing.convolution import pack_conv2d
from hf_cpu_accel.runtime import hardware
from tests.ops.convolution.test_images_in_bytes import Step, check, ranged, step
from tests.ops.test_tiers import available, run


def window(rng: random.Random, source: int, sizes: tuple[int, int]) -> ConvolutionStep:
    """Padding up to what sees nothing but zeros at the edge."""
    kernel, dilation = (rng.randint(1, 4), rng.randint(1, 4)), (rng.randint(1, 2), rng.randint(1, 2))
    weight = torch.randn(*sizes, *kernel) / (sizes[1] * kernel[0] * kernel[1]) ** 0.5
    return replace(
        step(source, sizes),
        weight=pack_conv2d(weight, "int8"),
        kernel_size=kernel,
        dilation=dilation,
        stride=(rng.randint(1, 2), rng.randint(1, 3)),
        padding=(rng.randint(0, 3), rng.randint(0, 3)),
    )


def chain(seed: int) -> tuple[list[Step], torch.Tensor]:
    """Two windows, a pooling or none, and a block whose residual has a border, or none."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    out = rng.choice((64, 128))
    image = torch.randn(rng.randint(1, 3), 64, rng.randint(9, 24), rng.randint(9, 40))
    steps: list[Step] = [step(0, (64, 64)), window(rng, 1, (out, 64))]
    if rng.random() < 0.3:
        steps.append(PoolingStep(2, out, (2, 2), (1, 1), (0, 0)))
    before = len(steps)
    activation = rng.choice(("relu", "none", "gelu"))
    steps += [
        step(before, (out, out), 3),
        step(before + 1, (out, out), 3, residual=before, activation=activation),
        step(before + 2, (rng.choice((40, 96)), out), rng.choice((1, 3))),
    ]
    return ranged(steps, image), image


def fits(steps: list[Step], image: torch.Tensor) -> bool:
    first = steps[1]
    sides = (image.shape[2:], first.kernel_size, first.stride, first.padding)
    dilation = first.dilation if isinstance(first, ConvolutionStep) else (1, 1)
    return all(out_size(*side) > 1 for side in zip(*sides, dilation, strict=True))


@pytest.mark.parametrize("seed", range(24))
def test_against_float64_and_the_reference(seed: int) -> None:
    steps, image = chain(seed)
    assert fits(steps, image)
    check(steps, image)


def test_each_thread_keeps_the_range_of_its_own_rows() -> None:
    """The largest values lie in one row, whose thread sees them once: what the other has seen must not take their place."""
    torch.manual_seed(0)
    image = torch.randn(1, 64, 40, 40)
    image[:, :, 5, 5] *= 50
    # The second makes floating point images of bytes, whose range the third needs.
    first, *others = step(0, (64, 64)), step(1, (64, 64), 3), step(2, (64, 64), 3)
    bound = bind([*ranged([first, others[0]], image)[:1], *others], narrow=False)
    torch.set_num_threads(1)
    expected = convolutions(image, bound)
    torch.set_num_threads(2)
    assert all(torch.equal(convolutions(image, bound), expected) for _ in range(300))


def digest(seeds: range) -> str:
    """Of the outputs of chains: what `test_the_same_integers_on_all_tiers` compares."""
    sha = hashlib.sha256()
    for seed in seeds:
        steps, image = chain(seed)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            sha.update(convolutions(image, bind(steps, narrow=False)).contiguous().numpy().tobytes())
    return sha.hexdigest()


@pytest.mark.skipif("avx512_vnni" not in available, reason="there are tiers without VNNI only")
def test_the_same_integers_on_all_tiers(tmp_path: Path) -> None:
    """That keep images in bytes; below them chains go on in floating point."""
    code = "from tests.ops.convolution.test_direct import digest; print(digest(range(6)))"
    tiers = {*available[available.index("avx512_vnni") :], hardware.EMULATED_AMX}
    assert len({run(tmp_path, tier, code) for tier in tiers}) == 1
