"""One comparison decides: structure, dtypes and integers exactly, floating-point numbers by rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from hf_cpu_accel.check import compare, is_rounding, row_error
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.tolerance import FEW_ROWS, Closeness, Tolerance

_FLOATS = [torch.float32, torch.bfloat16, torch.float64]


class Lazy(LazyTensor):
    """A lazy tensor of given values."""

    _values: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Any:
        lazy = cls.like(values.shape, values.dtype)
        lazy._values = values
        return lazy

    def _make(self) -> Tensor:
        return self._values


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moved(reference: Tensor, count: int, factor: float) -> Tensor:
    """Return `reference` [R, N] with its first rows times a factor."""
    output = reference.clone()
    output[:count] *= factor
    return output


def test_the_error_shows_scale_single_rows_and_nan() -> None:
    reference = rows(2, 3, 64)
    assert row_error(reference.clone(), reference) == 0
    assert row_error(reference * 1.01, reference) == pytest.approx(0.01, rel=1e-3)
    output = reference.clone()
    output[1, 2] *= -1
    assert row_error(output, reference) == pytest.approx(2)
    output[1, 2, 0] = torch.nan
    assert row_error(output, reference) == math.inf


def test_a_row_near_zero_is_measured_against_the_longest() -> None:
    reference = rows(20, 64)
    reference[0] = 0
    assert compare(reference.clone(), reference).within(0.0)
    assert not compare(reference + 0.01, reference).within(1e-3)
    zero = torch.zeros(3, 64)
    assert row_error(zero.clone(), zero) == 0
    assert row_error(zero + 1e-3, zero) > 1e6


@pytest.mark.parametrize("dtype", _FLOATS)
def test_the_fast_decision_is_that_of_the_error(dtype: torch.dtype) -> None:
    reference = rows(2, 20, 64).to(dtype)
    output = reference.clone()
    output[1, 2] *= 1.25
    assert row_error(output, reference) == pytest.approx(0.25, rel=1e-2)
    for bound in (0.2, 0.3):
        assert compare(output, reference).within(bound) is (bound > 0.25)
    counted = torch.ones(2, 20, dtype=torch.bool)
    assert not compare(output, reference, rows=counted).within(0.2)
    counted[1, 2] = False
    assert compare(output, reference, rows=counted).within(0.2)
    assert compare(output, reference, rows=counted).worst == 0
    assert compare(output, reference, rows=torch.zeros_like(counted)).within(0.0)


@pytest.mark.parametrize("scale", [1.0, 1e20, 1e-30])
def test_an_error_near_the_bound_is_decided_in_float64_at_any_size(scale: float) -> None:
    reference = torch.ones(3, 64) * scale
    for factor in (1 + 9.9e-4, 1 + 1.01e-3):
        comparison = compare((reference.double() * factor).float(), reference)
        assert comparison.within(1e-3) is (comparison.worst <= 1e-3)
    assert compare(reference.clone(), reference).within(1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_never_within(value: float) -> None:
    reference = torch.ones(20, 64)
    output = reference.clone()
    output[3, 5] = value
    for comparison in (compare(output, reference), compare(reference, output), compare(output, output)):
        assert comparison.worst == comparison.most == math.inf
        assert not comparison.within(1e9)
        assert not comparison.within(1e-3, few=math.inf)


def test_infinite_references_can_be_compared_exactly() -> None:
    reference = torch.tensor([[1.0, -math.inf, math.nan], [2.0, 3.0, 4.0]])
    assert compare(reference.clone(), reference, equal_nan=True).within(0.0)
    for value in (0.0, math.inf, torch.finfo(torch.float32).max):
        output = reference.clone()
        output[0, 1] = value
        assert not compare(output, reference, equal_nan=True).within(1.0)
    output = reference.nan_to_num(nan=0.0)
    assert not compare(output, reference, equal_nan=True).within(1.0)
    assert not compare(reference.double(), reference, equal_nan=True).within(1.0)


def test_a_few_rows_may_be_quantized_otherwise_and_no_more() -> None:
    reference, bound = rows(20, 64), 2e-3
    for count, few, expected in (
        (0, 1.0, True),
        (3, 1.0, False),
        (3, FEW_ROWS, True),
        (6, FEW_ROWS, False),
        (6, math.inf, False),
    ):
        assert compare(moved(reference, count, 1.003), reference).within(bound, few=few) is expected
    far = moved(reference, 1, 1.02)
    assert not compare(far, reference).within(bound, few=FEW_ROWS)
    assert compare(far, reference).within(bound, few=math.inf)
    assert not compare(reference[:3], reference).within(bound, few=FEW_ROWS)


def test_the_error_of_most_rows_is_that_of_the_worst_output() -> None:
    reference = rows(20, 64)
    outputs = moved(reference, 4, 2.0), moved(reference, 8, 1.5)
    assert compare(outputs[0], reference).most == 0
    comparison = compare(outputs, (reference, reference))
    assert comparison.worst == pytest.approx(1.0)
    assert comparison.most == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("output", "reference", "mismatch"),
    [
        (rows(2, 3), rows(3, 2), "of shape (2, 3) instead of (3, 2)"),
        (None, rows(3, 2), "of shape None instead of (3, 2)"),
        (rows(3, 2), None, "beside a reference of type NoneType"),
        (None, None, "beside a reference of type NoneType"),
        ((rows(2),), [rows(2)], "of type tuple instead of list"),
        ([rows(2)], [rows(2), rows(2)], "of 1 parts instead of 2"),
        ({"a": rows(2)}, {"b": rows(2)}, "with ['a'] instead of ['b']"),
        ((rows(2), 1), (rows(2), 2), "with another value that is not a tensor"),
        ((rows(2), None), (rows(2), rows(2)), "of shape None instead of (2,)"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "with other integers"),
        (torch.tensor([True]), torch.tensor([False]), "with other integers"),
        (
            torch.tensor([1], dtype=torch.int32),
            torch.tensor([1]),
            "of dtype torch.int32 instead of torch.int64",
        ),
        (torch.ones(2, dtype=torch.int64), torch.ones(2), "of dtype torch.int64 instead of torch.float32"),
    ],
)
def test_other_differences_are_mismatches(output: object, reference: object, mismatch: str) -> None:
    comparison = compare(output, reference)
    assert comparison.mismatch == mismatch
    assert comparison.worst == comparison.most == row_error(output, reference) == math.inf
    assert not comparison.within(1e9, few=math.inf)
    assert not comparison.within(Closeness(1e9, 1e9))
    with pytest.raises(ValueError, match="cannot compare an output"):
        _ = comparison.agreement


def test_dtypes_of_floating_point_numbers_count_if_asked_for() -> None:
    reference = rows(3, 8)
    assert compare(reference.double(), reference).within(0.0)
    strict = compare(reference.double(), reference, check_dtype=True)
    assert strict.mismatch == "of dtype torch.float64 instead of torch.float32"
    assert compare((reference, 1), (reference.clone(), 1), check_dtype=True).within(0.0)


def test_nested_outputs_are_compared_in_all_parts() -> None:
    def output(*, error: float = 0.0, ids: int = 0, flag: bool = True) -> BaseModelOutput:
        hidden = rows(2, 5, 8)
        states = (rows(2, 5, 8, seed=1), (rows(2, 5, 8, seed=2) * (1 + error), None))
        return BaseModelOutput(
            last_hidden_state=hidden, hidden_states=states, attentions=[torch.tensor(ids), flag]
        )  # type: ignore[arg-type]

    assert compare(output(), output()).within(0.0)
    assert compare(output(error=1e-3), output()).worst == pytest.approx(1e-3, rel=1e-3)
    assert not compare(output(error=1e-3), output()).within(1e-4)
    assert not compare(output(ids=1), output()).within(1.0)
    assert not compare(output(flag=False), output()).within(1.0)
    assert not compare(dict(output()), output()).within(1.0)


def test_a_bound_may_depend_on_the_dtype_of_each_tensor() -> None:
    reference = [rows(4, 8), rows(4, 8).bfloat16()]
    bounds = Tolerance(1e-5, 1e-2)
    assert compare([reference[0], reference[1] * 1.005], reference).within(bounds)
    assert not compare([reference[0] * 1.005, reference[1]], reference).within(bounds)


def test_single_values_need_the_dtype_of_the_reference() -> None:
    ones = torch.ones(3)
    assert compare(ones + 1e-6, ones).within(Closeness(1e-5, 0.0))
    assert not compare(ones.double(), ones).within(Closeness(1e-5, 0.0))
    assert not compare(ones * math.nan, ones).within(Closeness(1.0, 1.0))
    assert not compare(torch.ones(1), ones).within(Closeness(1.0, 1.0))  # which would broadcast


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), (2, 0, 4)])
def test_empty_tensors_agree_if_their_shapes_do(shape: tuple[int, ...]) -> None:
    empty = torch.empty(shape)
    comparison = compare(empty, empty.clone())
    assert comparison.worst == comparison.most == 0
    assert comparison.within(0.0)
    assert comparison.within(Closeness(0.0, 0.0))
    assert not compare(empty, torch.empty(*shape, 1)).within(1.0)


def test_numbers_are_rows_of_one() -> None:
    assert row_error(torch.tensor(1.1), torch.tensor(1.0)) == pytest.approx(0.1, rel=1e-5)
    assert compare(torch.tensor(1.1), torch.tensor(1.0)).within(0.2)
    assert row_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])) == 0


def test_rows_may_be_along_another_dimension() -> None:
    images = rows(2, 4, 5, 6)
    output = images.clone()
    output[1, :, 2, 3] *= 1.5  # a pixel
    assert row_error(output, images, dim=1) == pytest.approx(0.5)
    assert row_error(output, images) < 0.5
    counted = torch.ones(2, 5, 6, dtype=torch.bool)
    counted[1, 2, 3] = False
    assert compare(output, images, dim=1, rows=counted).worst == 0


def test_lazy_tensors_are_computed() -> None:
    values = rows(3, 8)
    assert compare((Lazy.of(values),), (Lazy.of(values.clone()),)).within(0.0)
    assert row_error(Lazy.of(values * 2), values) == pytest.approx(1.0)
    lazy = Lazy.of(values)
    assert compare(lazy, values).agreement.max_relative_error == 0
    assert not lazy.is_written


def test_reasons_name_the_worst_row_and_the_bound() -> None:
    reference = rows(3, 8)
    assert compare(reference, reference).reason(1e-4) is None
    reason = "its replacement differs by 1.0e+00 (relative, worst row; allowed 1e-04)"
    assert compare(reference * 2, reference).reason(1e-4) == reason
    reason = "its replacement differs by inf (relative, worst row; allowed 1e-04)"
    assert compare(reference[:2], reference).reason(1e-4) == reason


def test_rounding_is_no_farther_from_the_exact_output_than_the_reference() -> None:
    exact = rows(3, 8)
    rounded = exact.bfloat16()
    assert is_rounding(rounded, rounded, exact)
    assert is_rounding(exact, rounded, exact)
    assert not is_rounding(rounded * 2, rounded, exact)
    assert not is_rounding(rounded, rounded, exact * math.nan)
    assert not is_rounding(rounded, rounded, exact[:2])
    counted = torch.tensor([True, False, False])
    output = rounded.clone()
    output[1] *= 2
    assert is_rounding(output, rounded, exact, rows=counted)
    assert not is_rounding(output, rounded, exact)


@pytest.mark.parametrize("ignored", [math.nan, math.inf, -math.inf])
def test_values_without_a_finite_reference_can_be_ignored(ignored: float) -> None:
    reference = rows(3, 8)
    reference[0, 0] = ignored
    output = reference.clone()
    output[0, 0] = 7.0
    with pytest.raises(ValueError, match="reference output holds NaN"):
        _ = compare(output, reference).agreement
    agreement = compare(output, reference).where_finite().agreement
    assert agreement.worst_cosine == pytest.approx(1.0)
    assert agreement.max_relative_error == 0
    output[1] *= -1
    assert compare(output, reference).where_finite().agreement.worst_cosine == pytest.approx(-1.0)
