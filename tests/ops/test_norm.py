"""The norms against float64, over shapes, dtypes, layouts and thread counts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_cpu_accel.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

EPS = 1e-5
# float32: relative to the largest value of the output row. bfloat16 adds the rounding of the output.
FLOAT32_BOUND = 1e-5
BFLOAT16_ROUNDING = 2.0**-8
DTYPES = [torch.float32, torch.bfloat16]
COLUMNS = [1, 2, 7, 15, 16, 17, 33, 64, 65, 127, 200, 384, 768, 1025]


def truth_of(x: Tensor, weight: Tensor | None, bias: Tensor | None, rms: bool, eps: float = EPS) -> Tensor:
    x = x.double()
    if not rms:
        x = x - x.mean(dim=-1, keepdim=True)
    y = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


def assert_close(got: Tensor, truth: Tensor, dtype: torch.dtype, what: str) -> None:
    assert got.shape == truth.shape, what
    assert got.dtype == dtype, what
    assert got.is_contiguous(), what
    if got.numel() == 0:
        return
    bound = FLOAT32_BOUND * truth.abs().amax(dim=-1, keepdim=True).clamp_min(0.1)
    if dtype == torch.bfloat16:
        bound = bound + BFLOAT16_ROUNDING * truth.abs()
    excess = ((got - truth).abs() / bound).max()
    assert excess <= 1.0, f"{what}: {excess:.2f} times the bound"


def check(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    *,
    weight_dtype: torch.dtype | None = torch.float32,
    bias_dtype: torch.dtype | None = torch.float32,
    mean: float = 0.0,
    seed: int = 0,
) -> None:
    """All four norms on one input against float64; raises AssertionError."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, columns, generator=g) + mean).to(dtype)
    residual = torch.randn(rows, columns, generator=g).to(dtype)
    weight = None if weight_dtype is None else torch.randn(columns, generator=g).to(weight_dtype)
    bias = None if bias_dtype is None else torch.randn(columns, generator=g).to(bias_dtype)
    # The kernel adds in float32: what it normalizes is this sum, not the exact one.
    total = x.float() + residual.float()
    what = f"{rows}x{columns} {dtype} weight {weight_dtype} bias {bias_dtype} mean {mean}"
    assert_close(
        layer_norm(x, weight, bias, EPS), truth_of(x, weight, bias, False), dtype, f"layer_norm {what}"
    )
    assert_close(rms_norm(x, weight, EPS), truth_of(x, weight, None, True), dtype, f"rms_norm {what}")
    normed, added = add_layer_norm(x, residual, weight, bias, EPS)
    assert_close(normed, truth_of(total, weight, bias, False), dtype, f"add_layer_norm {what}")
    assert torch.equal(added, total.to(dtype)), what
    normed, added = add_rms_norm(x, residual, weight, EPS)
    assert_close(normed, truth_of(total, weight, None, True), dtype, f"add_rms_norm {what}")
    assert torch.equal(added, total.to(dtype)), what


def check_norm(seed: int = 0) -> None:
    """All of it in one call, for the test that repeats it on every instruction-set tier."""
    for dtype in DTYPES:
        for columns in COLUMNS:
            check(5, columns, dtype, seed=seed)
        for weight_dtype in (None, *DTYPES):
            for bias_dtype in (None, *DTYPES):
                check(3, 70, dtype, weight_dtype=weight_dtype, bias_dtype=bias_dtype, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_columns(columns: int, dtype: torch.dtype) -> None:
    check(5, columns, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES], ids=str)
def test_weights_may_be_absent_or_of_another_dtype(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> None:
    check(3, 70, dtype, weight_dtype=weight_dtype, bias_dtype=bias_dtype)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_random_shapes(rows: int, columns: int, dtype: torch.dtype, seed: int) -> None:
    check(rows, columns, dtype, seed=seed)


@pytest.mark.parametrize("columns", [2, 3, 7, 16, 40, 768])
@pytest.mark.parametrize("mean", [1.0, 4096.0])
def test_a_large_mean_costs_no_accuracy(mean: float, columns: int) -> None:
    """mean(x^2) - mean(x)^2 in float32 would give noise here, and so would a mean that is rounded to float32."""
    steps = torch.randint(-20, 20, (8, columns)).float()  # of the last place: the values are nearly equal
    x = mean * (1 + steps * 2.0**-23)
    for epsilon in (1e-12, EPS):
        truth = truth_of(x, None, None, False, epsilon)
        torch.testing.assert_close(layer_norm(x, None, None, epsilon).double(), truth, rtol=0, atol=1e-5)
    x = torch.randn(8, columns) + mean
    torch.testing.assert_close(
        layer_norm(x, None, None, EPS).double(), truth_of(x, None, None, False), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("residual_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_sees_the_sum_before_rounding(dtype: torch.dtype, residual_dtype: torch.dtype) -> None:
    x, residual = torch.randn(4, 96).to(dtype), torch.randn(4, 96).to(residual_dtype)
    normed, total = add_layer_norm(x, residual, None, None, EPS)
    exact = x.float() + residual.float()
    assert total.dtype == normed.dtype == dtype
    assert torch.equal(total, exact.to(dtype))
    assert_close(normed, truth_of(exact, None, None, False), dtype, "add_layer_norm")


def test_leading_dimensions_and_layouts_change_nothing() -> None:
    x, residual = torch.randn(3, 5, 24), torch.randn(3, 5, 24)
    weight, bias = torch.randn(24), torch.randn(24)
    expected = layer_norm(x, weight, bias, EPS)
    sum_expected = add_layer_norm(x, residual, weight, bias, EPS)
    assert torch.equal(layer_norm(x.view(15, 24), weight, bias, EPS), expected.view(15, 24))
    assert torch.equal(layer_norm(x[1, 2], weight, bias, EPS), expected[1, 2])
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda t: torch.zeros(3, 5, 48)[..., ::2].copy_(t),
        lambda t: torch.zeros(3, 5, 64)[..., :24].copy_(t),
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
    ]
    for layout in layouts:
        assert not layout(x).is_contiguous()
        normed = layer_norm(layout(x), weight, bias, EPS)
        torch.testing.assert_close(normed, expected, rtol=0, atol=1e-6)
        got = add_layer_norm(x, layout(residual), weight, bias, EPS)
        torch.testing.assert_close(got, sum_expected, rtol=0, atol=1e-6)
    row = torch.randn(24)
    assert torch.equal(
        rms_norm(row.expand(3, 5, 24), weight, EPS), rms_norm(row, weight, EPS).expand(3, 5, 24)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thread_count_does_not_change_the_result(dtype: torch.dtype) -> None:
    x = torch.randn(301, 384).to(dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = add_layer_norm(x, x, None, None, EPS)
        torch.set_num_threads(2)
        two = add_layer_norm(x, x, None, None, EPS)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
def test_non_finite_rows_are_not_hidden(poison: float) -> None:
    x = torch.randn(4, 70)
    x[2, 69] = poison
    for norm in (layer_norm(x, None, None, EPS), add_rms_norm(x, x, None, EPS)[0]):
        assert norm[2].isnan().any()
        assert norm[[0, 1, 3]].isfinite().all()


def test_no_columns() -> None:
    assert layer_norm(torch.zeros(3, 0), torch.zeros(0), None, EPS).shape == (3, 0)
    assert rms_norm(torch.zeros(0, 8), None, EPS).shape == (0, 8)


def test_bad_shapes_are_named() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"weight of shape \(7,\)"):
        layer_norm(x, torch.zeros(7), None, EPS)
    with pytest.raises(ValueError, match=r"bias of shape \(1,\)"):
        layer_norm(x, None, torch.zeros(1), EPS)
    with pytest.raises(ValueError, match=r"residual of shape \(8,\)"):
        add_rms_norm(x, torch.zeros(8), None, EPS)
    with pytest.raises(ValueError, match="at least one dimension"):
        rms_norm(torch.tensor(1.0), None, EPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 8, 40).to(dtype), torch.randn(40)
    ops = torch.ops.hf_cpu_accel
    torch.library.opcheck(ops.layer_norm, (x, weight, weight, EPS))
    torch.library.opcheck(ops.layer_norm, (x.transpose(0, 1), None, None, EPS))
    torch.library.opcheck(ops.rms_norm, (x, weight, EPS))
    torch.library.opcheck(ops.add_layer_norm, (x, x.flip(0), weight, weight, EPS))
    torch.library.opcheck(ops.add_rms_norm, (x, x.flip(0), None, EPS))


def test_traces_with_symbolic_shapes() -> None:
    weight = torch.randn(24)

    def block(x: Tensor) -> Tensor:
        normed, total = add_rms_norm(x, layer_norm(x, weight, None, EPS), weight, EPS)
        return rms_norm(normed, None, EPS) + add_layer_norm(total, x, None, weight, EPS)[0]

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 5, 24), (3, 9, 24), (2, 40, 24)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), block(x), rtol=0, atol=0)
