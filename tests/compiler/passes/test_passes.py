"""Each pass has a module of tests beside those of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_cpu_accel.compiler.passes import PASSES


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_has_tests_of_its_own(name: str) -> None:
    module = PASSES[name].__module__.rpartition(".")[2]
    tests = Path(__file__).parent / f"test_{module}.py"
    assert tests.exists(), f"{tests.name} is missing: test the pass {name} on a graph of a few nodes"
