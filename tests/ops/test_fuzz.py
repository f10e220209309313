"""Some of the cases of `make fuzz`, each tier's in a process of its own: an op that crashes must not take the tests along."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hf_cpu_accel import extension
from tests.children import run_child

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(("isa", "cases"), [("generic", 60), (extension.status().tier, 240)])
def test_random_calls(isa: str, cases: int) -> None:
    environment = {**os.environ, "HF_CPU_ACCEL_ISA": isa}
    environment["PYTHONPATH"] = f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = run_child(
        [sys.executable, "-m", "tests.ops.fuzz.worker", "--cases", str(cases)],
        env=environment,
        cpu_seconds=600,
    )
    last = done.stdout.split()[-1:] or ["none"]
    assert done.returncode == 0, f"status {done.returncode} in case {last[0]}:\n{done.stderr[-4000:]}"
    assert last == [str(cases - 1)]
