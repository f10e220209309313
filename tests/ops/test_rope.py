"""rotary_embedding against float64, over shapes, dtypes, layouts and thread counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_cpu_accel.ops.rope import rotary_embedding, rotary_embedding_reference

DTYPES = [torch.float32, torch.bfloat16]
FEATURES = [2, 6, 16, 30, 32, 34, 64, 66, 128, 200]


def inputs(
    batch: int,
    length: int,
    heads: int,
    features: int,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads, and tables whose halves differ; the cosines are the same for all sequences, the sines are not."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, heads, features, generator=g).to(dtype)
    cos = torch.randn(1, length, features, generator=g).to(table_dtype)
    sin = torch.randn(batch, length, features, generator=g).to(table_dtype)
    return x, cos, sin


def assert_close(got: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    truth = rotary_embedding_reference(x.double(), cos.double(), sin.double(), interleaved)
    assert got.shape == x.shape
    assert got.dtype == x.dtype
    assert got.is_contiguous()
    rounding = 2.0**-8 if x.dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(got.double(), truth, atol=1e-5, rtol=1e-5 + rounding)


def check(
    batch: int,
    length: int,
    heads: int,
    features: int,
    dtype: torch.dtype = torch.float32,
    table_dtype: torch.dtype = torch.float32,
    *,
    interleaved: bool = False,
    seed: int = 0,
) -> None:
    x, cos, sin = inputs(batch, length, heads, features, dtype, table_dtype, seed)
    assert_close(rotary_embedding(x, cos, sin, interleaved=interleaved), x, cos, sin, interleaved)


def check_rope(seed: int = 0) -> None:
    """All of it in one call, for the test that repeats it on every instruction-set tier."""
    for interleaved in (False, True):
        for dtype in DTYPES:
            for table_dtype in DTYPES:
                for features in FEATURES:
                    check(2, 3, 5, features, dtype, table_dtype, interleaved=interleaved, seed=seed)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("table_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", FEATURES)
def test_features(features: int, dtype: torch.dtype, table_dtype: torch.dtype, interleaved: bool) -> None:
    check(2, 3, 5, features, dtype, table_dtype, interleaved=interleaved)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(0, 3),
    length=st.integers(1, 40),
    heads=st.integers(1, 9),
    half=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    interleaved=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_shapes(
    batch: int, length: int, heads: int, half: int, dtype: torch.dtype, interleaved: bool, seed: int
) -> None:
    check(batch, length, heads, 2 * half, dtype, interleaved=interleaved, seed=seed)


@pytest.mark.parametrize("interleaved", [False, True])
def test_layouts_change_nothing(interleaved: bool) -> None:
    """A part of a wider projection, heads before positions, sequences that share tables, and features that are not dense."""
    x, cos, sin = inputs(2, 7, 4, 24, torch.float32, torch.float32, 0)
    expected = rotary_embedding(x, cos, sin, interleaved=interleaved)
    wide = torch.cat((x, x), dim=-1)[..., :24]
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    scattered = x.transpose(1, 3).contiguous().transpose(1, 3)
    tables = [table.repeat(1, 1, 2)[..., :24] for table in (cos, sin)]
    for other in (wide, turned, scattered):
        assert torch.equal(rotary_embedding(other, cos, sin, interleaved=interleaved), expected)
    assert torch.equal(rotary_embedding(x, *tables, interleaved=interleaved), expected)


def test_threads_change_nothing() -> None:
    x, cos, sin = inputs(2, 60, 8, 64, torch.float32, torch.float32, 0)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(rotary_embedding(x, cos, sin))
    assert torch.equal(*results)


def test_opcheck() -> None:
    for interleaved in (False, True):
        arguments = (*inputs(2, 3, 4, 16, torch.float32, torch.float32, 0), interleaved)
        torch.library.opcheck(torch.ops.hf_cpu_accel.rotary_embedding.default, arguments)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3, 16), (1, 3, 16), (1, 3, 16)), "input of shape"),
        (((2, 3, 4, 15), (1, 3, 15), (1, 3, 15)), "an even number of features"),
        (((2, 3, 4, 16), (3, 16), (1, 3, 16)), r"cos of shape \(3, 16\)"),
        (((2, 3, 4, 16), (1, 3, 16), (3, 3, 16)), r"sin of shape \(3, 3, 16\)"),
        (((2, 3, 4, 16), (1, 3, 8), (1, 3, 16)), r"cos of shape \(1, 3, 8\)"),
    ],
)
def test_bad_shapes_say_so(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary_embedding(*(torch.zeros(shape) for shape in shapes))
