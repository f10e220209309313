"""Ranges of images in 8 bits: each method against its definition, and errors against those of rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.packing.activation_range import ObservedValues


def observed(*images: Tensor) -> ObservedValues:
    values = ObservedValues()
    for see in (values.see_ends, values.count):
        for image in images:
            see(image)
    return values


def rounded(x: Tensor, low: float, high: float) -> Tensor:
    width = (high - low) / 255
    return (torch.round(x.clamp(low, high) / width)) * width


def test_ends_hold_zero() -> None:
    assert observed(torch.full((1, 4), 3.0)).range("min-max") == (0.0, 3.0)
    assert observed(torch.full((1, 4), -3.0), torch.tensor([[-5.0]])).range("min-max") == (-5.0, 0.0)
    for method in ("min-max", "percentile", "squared-error"):
        assert observed(torch.zeros(2, 3)).range(method) == (0.0, 0.0)


def test_the_error_is_that_of_rounding() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 50_000).relu()
    values = observed(x[:2], x[2:])
    for high in (values.high, 0.5 * values.high, 0.2 * values.high):
        actual = float((x - rounded(x, 0.0, high)).square().sum())
        assert values.error((0.0, high)) == pytest.approx(actual, rel=0.05)
    assert values.relative(values.squares) == pytest.approx(1.0)
    own = sum(float((row - rounded(row, 0.0, float(row.max()))).square().sum()) for row in x)
    assert values.own_error == pytest.approx(own, rel=0.05)


def test_least_squared_error_leaves_out_what_is_far_away() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 400_000).relu()
    x[0, 0] = 20.0
    values = observed(x)
    low, high = values.range("squared-error")
    assert low == 0.0
    assert 4.0 < high < 18.0
    assert values.error((low, high)) < 0.9 * values.error(values.range("min-max"))


def test_percentiles_leave_out_one_in_ten_thousand() -> None:
    torch.manual_seed(0)
    x = torch.rand(1, 200_000)
    x[0, :2] = 9.0
    low, high = observed(x).range("percentile")
    assert low < 0.02
    assert 0.98 < high < 1.02
    signed = observed(torch.cat((x, -x), dim=1)).range("percentile")
    assert -1.02 < signed[0] < -0.98
