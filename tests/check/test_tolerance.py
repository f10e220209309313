"""Bounds stand in one file, by dtypes or names of packed weights."""

import re
from pathlib import Path

import torch

import hf_cpu_accel
from hf_cpu_accel.check import compare
from hf_cpu_accel.packing.linear import FORMS
from hf_cpu_accel.tolerance import PACKED, Closeness, Tolerance

# torch's comparison, which has bounds by default, and numbers that are handed to Python's.
_COMPARES = re.compile(r"\ballclose\(|tol=\d")


def test_no_other_file_compares_by_a_number_of_its_own() -> None:
    package = Path(hf_cpu_accel.__file__).parent
    found = {
        f"{path.relative_to(package)}: {line.strip()}"
        for path in package.rglob("*.py")
        if path != package / "check" / "comparison.py"
        for line in path.read_text().splitlines()
        if _COMPARES.search(line)
    }
    assert not found


def test_bounds_of_packed_weights_are_there_for_each_form() -> None:
    assert PACKED.float32 <= PACKED.bfloat16
    assert all(PACKED.of(form) > 0 for form in FORMS)


def test_bounds_depend_on_the_width_of_a_dtype() -> None:
    bounds = Tolerance(1e-5, 1e-2)
    assert bounds.of(torch.float64) == bounds.of(torch.float32) == bounds.of("float32") == 1e-5
    assert bounds.of(torch.float16) == bounds.of(torch.bfloat16) == 1e-2


def test_activations_in_bfloat16_are_rounded_beside_any_weight() -> None:
    bounds = Tolerance(1e-4, 2e-2, int8=0.1)
    assert [bounds.of(form, torch.float32) for form in ("float32", "bfloat16", "int8")] == [1e-4, 2e-2, 0.1]
    assert [bounds.of(form, torch.bfloat16) for form in ("float32", "bfloat16", "int8")] == [2e-2, 2e-2, 0.1]


def test_closeness_is_relative_to_the_reference() -> None:
    ones = torch.ones(3)
    assert compare(1.09 * ones, ones).within(Closeness(0.1, 0.0))
    assert not compare(1.11 * ones, ones).within(Closeness(0.1, 0.0))
    assert compare(1.11 * ones, ones).within(Closeness(0.0, 0.2))
