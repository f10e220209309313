"""Row-wise agreement catches what one flattened cosine hides."""

import math

import pytest
import torch

from hf_cpu_accel.check import float_tensors
from hf_cpu_accel.measure import compare


def test_equal_outputs_agree() -> None:
    x = torch.randn(2, 5, 8)
    agreement = compare([x], [x.clone()])
    assert agreement.worst_cosine == pytest.approx(1.0, abs=1e-12)
    assert agreement.max_relative_error == 0.0


def test_one_wrong_row_among_many_shows() -> None:
    x = torch.randn(1000, 8)
    y = x.clone()
    y[7] = -y[7]
    assert compare([y], [x]).worst_cosine == pytest.approx(-1.0)


def test_wrong_scale_shows_in_the_error() -> None:
    x = torch.randn(4, 8)
    agreement = compare([x * 2], [x])
    assert agreement.worst_cosine == pytest.approx(1.0)
    assert agreement.max_relative_error == pytest.approx(1.0)


def test_nan_is_the_worst_possible() -> None:
    x = torch.ones(2, 3)
    y = x.clone()
    y[0, 0] = math.nan
    agreement = compare([y], [x])
    assert (agreement.worst_cosine, agreement.max_relative_error) == (-1.0, math.inf)


def test_a_broken_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="reference output holds NaN"):
        compare([torch.ones(2)], [torch.tensor([1.0, math.nan])])


def test_zero_rows() -> None:
    zero, one = torch.zeros(1, 3), torch.ones(1, 3)
    assert compare([zero], [zero]).worst_cosine == 1.0
    assert compare([zero], [one]).worst_cosine == 0.0
    assert compare([torch.empty(0, 3)], [torch.empty(0, 3)]).worst_cosine == 1.0


def test_low_precision_inputs_are_compared_in_float64() -> None:
    x = torch.randn(16, 32)
    agreement = compare([x.bfloat16()], [x])
    assert 0.9999 < agreement.worst_cosine < 1.0
    assert 0 < agreement.max_relative_error < 2**-8


def test_shapes_must_match() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\).*same call"):
        compare([torch.ones(2, 3)], [torch.ones(3, 2)])
    with pytest.raises(ValueError, match="same call"):
        compare([], [])


def test_float_tensors_flattens_model_outputs() -> None:
    hidden, pooled = torch.ones(1, 2), torch.zeros(1)
    output = {"hidden": hidden, "ids": torch.ones(1, dtype=torch.long), "more": (pooled, None), "name": "x"}
    assert [t.data_ptr() for t in float_tensors(output)] == [hidden.data_ptr(), pooled.data_ptr()]
    assert float_tensors(hidden)[0].data_ptr() == hidden.data_ptr()
    assert float_tensors(None) == []
