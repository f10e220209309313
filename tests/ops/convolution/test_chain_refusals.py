"""What chains of convolutions refuse."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from hf_cpu_accel.ops.chain.steps import CombineStep, PoolingStep
from hf_cpu_accel.ops.convolution_chain import bind, convolutions
from hf_cpu_accel.packing.convolution import pack_conv2d
from tests.ops.convolution.chain_cases import chain, stem


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


def test_a_sum_with_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"steps\[0\]: activation='softmax': must be one of none, "):
        bind([CombineStep(0, 16, None, product=False, activation="softmax")], narrow=False)


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
