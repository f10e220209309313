"""linear against float64, over shapes, dtypes, activations, layouts and thread counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_cpu_accel.ops.linear import ACTIVATIONS, linear, linear_split
from hf_cpu_accel.packing.affine import AffineGroups
from hf_cpu_accel.packing.linear import pack_affine, pack_linear, unpack_linear, unpack_values
from hf_cpu_accel.packing.rotation import rotate_back
from tests.ops.linear_cases import (
    BOUND,
    SHAPES,
    check,
    check_largest_products,
    check_rounding_of_wide_input,
    check_weight_as_it_is,
    check_within_half_a_step,
)

WIDTHS = (1, 2, 6, 31, 64, 65, 144, 1000, 4099)


def check_linear(seed: int = 0) -> None:
    """All of it in one call, for the test that repeats it on every instruction-set tier."""
    for shape in SHAPES:
        check_weight_as_it_is(*shape, seed=seed)
    for dtype in BOUND:
        for m, k, n in SHAPES:
            check(m, k, n, dtype, seed=seed)
        for activation in ACTIVATIONS:
            check(17, 96, 70, dtype, activation, residual=True, seed=seed)
    for dtype in ("int8", "int4"):
        for k in WIDTHS:
            check_largest_products(dtype, k)


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2])
def test_largest_products(dtype: str, k: int, threads: int) -> None:
    torch.set_num_threads(threads)
    check_largest_products(dtype, k)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int], dtype: str) -> None:
    check(*shape, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_as_it_is(shape: tuple[int, int, int]) -> None:
    check_weight_as_it_is(*shape)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_residual(dtype: str, activation: str) -> None:
    check(17, 96, 70, dtype, activation, residual=True)


@pytest.mark.parametrize("shape", [(1, 251, 1), (1, 300, 2), (7, 96, 70)], ids=str)
def test_rounding_of_wide_input(shape: tuple[int, int, int]) -> None:
    for seed in range(50):
        check_rounding_of_wide_input(*shape, seed=seed)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 70),
    k=st.integers(1, 300),
    n=st.integers(1, 140),
    dtype=st.sampled_from(list(BOUND)),
    seed=st.integers(0, 99),
)
def test_random_shapes(m: int, k: int, n: int, dtype: str, seed: int) -> None:
    if dtype not in ("int8", "int4"):
        check(m, k, n, dtype, seed=seed)
        return
    # A few input features do not average the rounding out: the limit is half a step for each of them.
    g = torch.Generator().manual_seed(seed)
    check_within_half_a_step(torch.randn(m, k, generator=g), torch.randn(n, k, generator=g) / k**0.5, dtype)


@pytest.mark.parametrize("dtype", BOUND)
def test_layouts_and_leading_dimensions_change_nothing(dtype: str) -> None:
    packed = pack_linear(torch.randn(40, 24), dtype)
    x = torch.randn(3, 5, 24)
    expected = linear(x, packed)
    assert expected.shape == (3, 5, 40)
    spaced = torch.randn(3, 5, 48)[..., ::2].copy_(x)
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    rows_apart = torch.zeros(3, 5, 64)[..., :24].copy_(x)
    for layout in (spaced, transposed, rows_apart):
        assert not layout.is_contiguous()
        assert torch.equal(linear(layout, packed), expected)
    assert torch.equal(linear(x[0, 0], packed), linear(x[:1, 0], packed)[0])


@pytest.mark.parametrize("dtype", BOUND)
def test_bfloat16_input_and_output(dtype: str) -> None:
    x, w, bias = torch.randn(9, 50).bfloat16(), torch.randn(33, 50) / 7, torch.randn(33).bfloat16()
    packed = pack_linear(w, dtype)
    truth = F.linear(x.double(), unpack_linear(packed).double(), bias.double())
    got = linear(x, packed, bias)
    assert got.dtype == torch.bfloat16
    bound = max(BOUND[dtype], 1e-2)
    assert (got.double() - truth).abs().max() <= bound * truth.abs().max()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_gives_the_integers_of_its_unpacked_weights(group: int) -> None:
    """Few rows multiply four-bit weights as they are, many rows unpack them: both are the int8 product of the same integers."""
    packed = pack_linear(torch.randn(70, 330), "int4", int4_group=group)
    as_int8 = replace(pack_linear(torch.zeros(70, 330), "int8"), scale=packed.scale)
    as_int8.data.copy_(as_panels(unpack_values(packed)))
    for rows in (*range(1, 18), 40, 300):
        x = torch.randn(rows, 330)
        assert torch.equal(linear(x, packed), linear(x, as_int8)), rows


@pytest.mark.parametrize("dtype", [dtype for dtype in BOUND if dtype not in ("float32", "bfloat16")])
def test_integers_of_a_row_do_not_depend_on_other_rows(dtype: str) -> None:
    """However many are multiplied together: sums of integers are exact, and floats are added in one order."""
    for k in (5, 100, 513, 1029):
        packed, x = pack_linear(torch.randn(70, k), dtype), torch.randn(40, k)
        together = linear(x, packed)
        for rows in (*range(1, 14), 17):
            assert torch.equal(torch.cat([linear(part, packed) for part in x.split(rows)]), together), (
                k,
                rows,
            )


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("k", [64, 508, 512, 516, 1024, 65536])
def test_sums_of_the_largest_integers_do_not_overflow(k: int, sign: int) -> None:
    """All integers of a row and of the weights are the largest ones: where they are added in parts, no part may be too long."""
    x = rotate_back(torch.full((7, k), 3.0))
    for dtype in ("int8", "int8-weight"):
        packed = pack_linear(torch.zeros(40, k), dtype)
        packed.data.fill_(127 * sign)
        packed = replace(
            packed, scale=torch.stack([torch.full((40,), 1e-3), torch.full((40,), 127.0 * sign * k)])
        )
        expected = torch.full((7, 40), 3 * 0.127 * sign * k)
        torch.testing.assert_close(linear(x, packed), expected, rtol=1e-4, atol=0)
    for bits in (4, 8):
        most = 2**bits - 1
        for group in (16, 32, 64, 192):
            q, ones = torch.full((40, k), most, dtype=torch.uint8), torch.ones(40, -(-k // group))
            packed = pack_affine(AffineGroups(q, ones, 0.5 * ones, bits, group))
            expected = torch.full((7, 40), 3 * (most + 0.5) * sign * k)
            torch.testing.assert_close(
                linear(torch.full((7, k), 3.0 * sign), packed), expected, rtol=1e-4, atol=0
            )


def as_panels(values: Tensor) -> Tensor:
    """int8 [N, K] in the layout of packing/linear.py."""
    padded = F.pad(values, (0, -values.shape[1] % 4, 0, -values.shape[0] % 32))
    return padded.view(-1, 32, padded.shape[1] // 4, 4).transpose(1, 2)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("threads", [2, 3])
def test_thread_count_changes_nothing(dtype: str, threads: int) -> None:
    x, packed = torch.randn(130, 384), pack_linear(torch.randn(96, 384), dtype)
    torch.set_num_threads(1)
    one = linear(x, packed)
    torch.set_num_threads(threads)
    assert torch.equal(linear(x, packed), one)


@pytest.mark.parametrize("dtype", BOUND)
def test_empty_input(dtype: str) -> None:
    packed = pack_linear(torch.randn(40, 24), dtype)
    assert linear(torch.empty(0, 24), packed).shape == (0, 40)
    assert linear(torch.empty(2, 0, 24), packed).shape == (2, 0, 40)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_rows_stay_in_their_row(dtype: str, poison: float) -> None:
    packed = pack_linear(torch.randn(40, 24), dtype)
    x = torch.randn(5, 24)
    clean = linear(x, packed)
    x[2, 3] = poison
    got = linear(x, packed)
    assert not got[2].isfinite().any()
    assert torch.equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_no_input_features_give_the_bias() -> None:
    bias = torch.randn(40)
    for dtype in BOUND:
        packed = pack_linear(torch.zeros(40, 0), dtype)
        assert torch.equal(linear(torch.zeros(3, 0), packed, bias), bias.expand(3, 40))


@pytest.mark.parametrize("level", [0.0, 1000.0], ids=["centered", "shifted"])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30])
@pytest.mark.parametrize("features", [64, 300])
def test_int8_follows_the_range_of_a_row(scale: float, level: float, features: int) -> None:
    """Tiny, huge, one-sided and nearly constant rows: the error is half a step of the row's own range."""
    weight = torch.randn(40, features) / 8
    for x in (
        torch.randn(3, features) + level,
        torch.rand(3, features) + level,
        torch.full((1, features), 3.0),
        torch.zeros(1, features),
    ):
        check_within_half_a_step(x * scale, weight)


@pytest.mark.parametrize("features", [64, 200])
def test_int8_at_the_ends_of_float32(features: int) -> None:
    packed = pack_linear(torch.full((40, features), 1e-3), "int8")
    x = torch.linspace(-1e-37, 1e-37, features)[None]
    for tiny in (torch.zeros(1, features), torch.full((1, features), 1e-39), x):
        assert linear(tiny, packed).abs().max() <= 1e-36
    big = torch.zeros(1, features)
    big[0, 0] = 2e37
    # One feature is spread over 16, ten of which count up and six down where all weights are alike: each may be off by 1/253 of
    # them, 16/4 times that is the sum.
    torch.testing.assert_close(linear(big, packed), torch.full((1, 40), 2e34), rtol=1.65e-2, atol=0)
    big[0, 1] = -2e37
    assert linear(big, packed).abs().max() <= 2e37 * 1e-3 * 0.1
    # The rotation adds up 16 features: what that may overflow for is NaN and not wrong.
    assert linear(torch.full((1, features), 3.2e38), packed).isnan().all()


def test_gelu_of_large_negative_numbers_is_zero() -> None:
    packed = pack_linear(torch.eye(32), "float32")
    x = -torch.logspace(1, 30, 32)[None]
    assert linear(x, packed, activation="gelu").abs().max() <= 1e-6


def test_zero_rows_and_zero_weights_give_the_bias() -> None:
    bias = torch.randn(40)
    for dtype in BOUND:
        packed = pack_linear(torch.zeros(40, 24), dtype)
        assert torch.equal(linear(torch.randn(2, 24), packed, bias), bias.expand(2, 40))
        packed = pack_linear(torch.randn(40, 24), dtype)
        assert torch.equal(linear(torch.zeros(2, 24), packed, bias), bias.expand(2, 40))


@pytest.mark.parametrize("dtype", BOUND)
def test_opcheck(dtype: str) -> None:
    packed = pack_linear(torch.randn(40, 24), dtype)
    x, bias = torch.randn(3, 5, 24), torch.randn(40)
    ops = torch.ops.hf_cpu_accel
    torch.library.opcheck(ops.linear, (x, packed.data, packed.scale, bias, None, 40, "gelu"))


@pytest.mark.parametrize("dtype", BOUND)
def test_traces_with_dynamic_shapes(dtype: str) -> None:
    packed = pack_linear(torch.randn(40, 24), dtype)
    compiled = torch.compile(
        lambda x: linear(x, packed) * 2, backend="aot_eager", fullgraph=True, dynamic=True
    )
    for rows in (3, 8):
        x = torch.randn(rows, 24)
        assert torch.equal(compiled(x), linear(x, packed) * 2)


def test_bad_arguments_are_named() -> None:
    packed = pack_linear(torch.randn(40, 24), "float32")
    with pytest.raises(ValueError, match="must be 24"):
        linear(torch.randn(3, 25), packed)
    with pytest.raises(ValueError, match="activation='swoosh'"):
        linear(torch.randn(3, 24), packed, activation="swoosh")
    with pytest.raises(RuntimeError, match="bias"):
        linear(torch.randn(3, 24), packed, torch.randn(39))
    with pytest.raises(RuntimeError, match="residual"):
        linear(torch.randn(3, 24), packed, residual=torch.randn(3, 39))
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        linear(torch.randn(3, 24).double(), packed)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("sizes", [[70], [32, 32, 32], [64, 32, 7]], ids=str)
def test_split_outputs_are_the_slices_of_one(dtype: str, sizes: list[int]) -> None:
    packed, bias = pack_linear(torch.randn(sum(sizes), 50), dtype), torch.randn(sum(sizes))
    for x in (torch.randn(3, 11, 50), torch.randn(2, 50).bfloat16(), torch.empty(0, 50)):
        expected = linear(x, packed, bias).split(sizes, dim=-1)
        got = linear_split(x, packed, bias, sizes)
        assert all(part.is_contiguous() for part in got)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


def test_split_opcheck_and_bad_sizes() -> None:
    packed = pack_linear(torch.randn(100, 24), "int4")
    x = torch.randn(3, 24)
    torch.library.opcheck(torch.ops.hf_cpu_accel.linear_split, (x, packed.data, packed.scale, None, [64, 36]))
    with pytest.raises(ValueError, match="sum must be 100"):
        linear_split(x, packed, None, [64, 32])
    with pytest.raises(RuntimeError, match="multiples of 32"):
        linear_split(x, packed, None, [50, 50])
