"""Group norm, with and without SiLU, against float64 in every layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.ops.group_norm import group_norm

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16]
# Groups, channels, pixels: vectors with a rest, one channel per group, one group, chunks of pixels with a rest, single pixels.
SHAPES = [
    (1, 1, (1,)),
    (2, 6, (5,)),
    (32, 320, (7, 9)),
    (4, 4, (3, 11)),
    (1, 17, (33,)),
    (8, 64, (16, 16)),
    (5, 35, (2, 3, 7)),
    (3, 48, ()),
]


def truth_of(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, activation: str) -> Tensor:
    weight, bias = (None if vector is None else vector.double() for vector in (weight, bias))
    output = functional.group_norm(x.double(), groups, weight, bias, EPS)
    return functional.silu(output) if activation == "silu" else output


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values with pixels together, channels together, and in neither way."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    return {
        "planes": x.contiguous(),
        "channels last": x.movedim(1, -1).contiguous().movedim(-1, 1),
        "every other": wide[..., ::2].copy_(x),
        "backwards": x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
    }


def check(groups: int, channels: int, pixels: tuple[int, ...], dtype: torch.dtype, *, seed: int = 0) -> None:
    """Both activations in all layouts against float64; raises AssertionError."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(3, channels, *pixels, generator=g) * 2 + 1).to(dtype)
    weight, bias = torch.randn(2, channels, generator=g)
    for activation in ("none", "silu"):
        truth = truth_of(x, groups, weight, bias, activation)
        bound = 2e-5 * truth.abs().max().clamp_min(1.0)
        if dtype is torch.bfloat16:
            bound = bound + 2.0**-8 * truth.abs()
        for name, input in layouts(x).items():
            got = group_norm(input, groups, weight, bias, EPS, activation=activation)
            what = f"{groups} of {channels}x{pixels} {dtype} {activation} {name}"
            assert got.dtype is dtype, what
            assert got.shape == x.shape, what
            assert got.stride() == input.stride() or name in ("every other", "backwards") or 1 in x.shape, (
                what
            )
            assert bool(((got.double() - truth).abs() <= bound).all()), what


def check_group_norm(seed: int = 0) -> None:
    """All of it in one call, for the test that repeats it on every instruction-set tier."""
    for dtype in DTYPES:
        for groups, channels, pixels in SHAPES:
            check(groups, channels, pixels, dtype, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("groups", "channels", "pixels"), SHAPES)
def test_shapes(
    groups: int, channels: int, pixels: tuple[int, ...], dtype: torch.dtype, threads: int
) -> None:
    check(groups, channels, pixels, dtype)


@given(
    groups=st.integers(1, 9),
    wide=st.integers(1, 40),
    pixels=st.lists(st.integers(1, 40), max_size=2),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_random_shapes(groups: int, wide: int, pixels: list[int], dtype: torch.dtype, seed: int) -> None:
    check(groups, groups * wide, tuple(pixels), dtype, seed=seed)


@pytest.mark.parametrize("layout", ["planes", "channels last"])
@pytest.mark.parametrize("mean", [100.0, 4096.0])
def test_a_large_mean_costs_no_accuracy(mean: float, layout: str) -> None:
    """mean(x^2) - mean(x)^2 in float32 would give noise here, and so would a mean that is rounded to float32."""
    x = layouts(mean * (1 + torch.randint(-20, 20, (2, 8, 65)).float() * 2.0**-23))[layout]
    truth = truth_of(x, 2, None, None, "none")
    torch.testing.assert_close(group_norm(x, 2, None, None, EPS).double(), truth, rtol=0, atol=2e-4)


@pytest.mark.parametrize("weight_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES], ids=str)
def test_weights_may_be_absent_or_of_another_dtype(
    weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> None:
    x = torch.randn(2, 24, 5, 5)
    weight, bias = (None if t is None else torch.randn(24).to(t) for t in (weight_dtype, bias_dtype))
    truth = truth_of(x, 4, weight, bias, "silu")
    for input in layouts(x).values():
        got = group_norm(input, 4, weight, bias, EPS, activation="silu")
        torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["planes", "channels last"])
def test_thread_count_does_not_change_the_result(layout: str) -> None:
    x = layouts(torch.randn(2, 64, 40, 33))[layout]
    torch.set_num_threads(1)
    one = group_norm(x, 32, None, None, EPS)
    torch.set_num_threads(2)
    assert torch.equal(group_norm(x, 32, None, None, EPS), one)


@pytest.mark.parametrize("layout", ["planes", "channels last"])
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
def test_a_group_that_is_not_finite_is_not_hidden(poison: float, layout: str) -> None:
    x = torch.randn(2, 8, 40)
    x[1, 5, 39] = poison
    got = group_norm(layouts(x)[layout], 2, None, None, EPS)
    assert got[1, 4:].isnan().any()
    assert got[0].isfinite().all()
    assert got[1, :4].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 8, 3), (2, 8, 0), (2, 8, 0, 4)])
def test_nothing_to_normalize(shape: tuple[int, ...]) -> None:
    assert group_norm(torch.zeros(shape), 4, None, None, EPS).shape == shape


def test_bad_arguments_are_named() -> None:
    x = torch.zeros(2, 8, 3)
    with pytest.raises(ValueError, match="groups=3: must divide the 8 channels"):
        group_norm(x, 3, None, None, EPS)
    with pytest.raises(ValueError, match=r"weight of shape \(7,\)"):
        group_norm(x, 2, torch.zeros(7), None, EPS)
    with pytest.raises(ValueError, match=r"bias of shape \(1,\)"):
        group_norm(x, 2, None, torch.zeros(1), EPS)
    with pytest.raises(ValueError, match="activation='gelu'"):
        group_norm(x, 2, None, None, EPS, activation="gelu")
    with pytest.raises(ValueError, match=r"input of shape \(8,\)"):
        group_norm(x[0, :, 0], 2, None, None, EPS)


@pytest.mark.parametrize("layout", ["planes", "channels last", "every other", "backwards"])
def test_opcheck(layout: str) -> None:
    x, vector = layouts(torch.randn(3, 8, 5, 6))[layout], torch.randn(8)
    for arguments in ((x, 2, vector, vector, EPS, "silu"), (x.bfloat16(), 4, None, None, EPS, "none")):
        torch.library.opcheck(torch.ops.hf_cpu_accel.group_norm, arguments)
