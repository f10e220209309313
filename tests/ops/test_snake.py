"""snake against float64, over shapes, dtypes, layouts and thread counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_cpu_accel.ops.snake import snake, snake_reference

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(2, 3, 50), (1, 40, 7), (2, 1, 1), (3, 16, 33), (1, 5, 16)]
BOUND = 2e-6  # of float32, absolute for numbers up to 1 and relative for larger ones


def inputs(
    batch: int, channels: int, length: int, dtype: torch.dtype, *, channels_last: bool, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = (batch, length, channels) if channels_last else (batch, channels, length)
    x = torch.randn(shape, generator=g) * 10.0 ** float(torch.randint(-2, 3, (), generator=g))
    alpha, scale = (torch.rand(channels, generator=g) + 0.1 for _ in range(2))
    return x.to(dtype), alpha, scale


def assert_close(got: Tensor, x: Tensor, alpha: Tensor, scale: Tensor, channels_last: bool) -> None:
    """The sine is that of alpha x in float32, as it is in models: of a large one it depends on how that was rounded."""
    product = (alpha if channels_last else alpha[:, None]) * x.float()
    truth = (
        x.double() + (scale if channels_last else scale[:, None]).double() * product.double().sin().square()
    )
    assert got.shape == x.shape
    assert got.dtype == x.dtype
    assert got.is_contiguous()
    rounding = 2.0**-8 if x.dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(got.double(), truth, atol=BOUND, rtol=BOUND + rounding)


def check(
    batch: int, channels: int, length: int, dtype: torch.dtype, *, channels_last: bool, seed: int = 0
) -> None:
    arguments = inputs(batch, channels, length, dtype, channels_last=channels_last, seed=seed)
    assert_close(snake(*arguments, channels_last=channels_last), *arguments, channels_last)


def check_snake(seed: int = 0) -> None:
    """All of it in one call, for the test that repeats it on every instruction-set tier."""
    for channels_last in (False, True):
        for dtype in DTYPES:
            for shape in SHAPES:
                check(*shape, dtype, channels_last=channels_last, seed=seed)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int], dtype: torch.dtype, channels_last: bool) -> None:
    check(*shape, dtype, channels_last=channels_last)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(0, 3),
    channels=st.integers(0, 70),
    length=st.integers(0, 90),
    dtype=st.sampled_from(DTYPES),
    channels_last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_shapes(
    batch: int, channels: int, length: int, dtype: torch.dtype, channels_last: bool, seed: int
) -> None:
    check(batch, channels, length, dtype, channels_last=channels_last, seed=seed)


@pytest.mark.parametrize("alpha", [1.0, 0.3, 1e-3, 7.0])
def test_all_sizes_of_numbers(alpha: float) -> None:
    """Up to alpha x = 1e5, on both sides."""
    x = torch.logspace(-8, 5, 4001) / alpha
    x = torch.cat((x, -x))[None, None]
    numbers = torch.tensor([alpha]), torch.tensor([1 / alpha])
    assert_close(snake(x, *numbers), x, *numbers, False)


def test_numbers_beyond_reach() -> None:
    """A sine of more than 1e5 is somewhere from 0 to 1; infinity and NaN give what the sine of them is."""
    x = torch.tensor([1e6, -1e9, 1e30, 3e38])[None, None]
    one = torch.ones(1)
    got = snake(x, one, torch.full((1,), 0.5))
    assert ((got - x >= 0) & (got - x <= 0.5 + x.abs() * 2**-23)).all()
    assert snake(torch.tensor([[[float("inf"), float("-inf"), float("nan")]]]), one, one).isnan().all()


@pytest.mark.parametrize("channels_last", [False, True])
def test_layouts_change_nothing(channels_last: bool) -> None:
    x, *numbers = inputs(2, 24, 30, torch.float32, channels_last=channels_last)
    expected = snake(x, *numbers, channels_last=channels_last)
    wide = torch.cat((x, x), dim=-1)[..., : x.shape[2]]
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    for other in (wide, turned):
        assert torch.equal(snake(other, *numbers, channels_last=channels_last), expected)


def test_threads_change_nothing() -> None:
    arguments = inputs(2, 64, 400, torch.float32, channels_last=False)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(snake(*arguments))
    assert torch.equal(*results)


def test_opcheck() -> None:
    for channels_last in (False, True):
        arguments = inputs(2, 5, 9, torch.float32, channels_last=channels_last)
        torch.library.opcheck(torch.ops.hf_cpu_accel.snake.default, (*arguments, channels_last))


def test_reference_is_the_formula() -> None:
    x, alpha, scale = inputs(2, 5, 9, torch.float64, channels_last=False)
    expected = x + scale[:, None].double() * torch.sin(alpha[:, None].double() * x) ** 2
    torch.testing.assert_close(snake_reference(x, alpha, scale, False), expected)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3), (3,), (3,)), r"input of shape \(2, 3\)"),
        (((2, 3, 4), (4,), (3,)), r"alpha of shape \(4,\): must be \[3\]"),
        (((2, 3, 4), (3,), (1, 3)), r"scale of shape \(1, 3\)"),
    ],
)
def test_bad_shapes_say_so(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        snake(*(torch.zeros(shape) for shape in shapes))
