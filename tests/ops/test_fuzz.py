"""Some of the cases of `make fuzz`, each tier's in a process of its own: an op that crashes must not take the tests along."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_cpu_accel import extension
from hf_cpu_accel.runtime import hardware
from tests.ops.asan import watched
from tests.programs import run_program


@pytest.mark.parametrize(("isa", "cases"), [("generic", 60), (extension.status().tier, 240)])
def test_random_calls(tmp_path: Path, isa: str, cases: int) -> None:
    source = f"""
import sys
sys.argv[1:] = ["--cases", "{cases}"]
from tests.ops.fuzz.worker import main
sys.exit(main())
"""
    done = run_program(
        source,
        folder=tmp_path,
        environment={**os.environ, "HF_CPU_ACCEL_ISA": isa},
        cpu_seconds=600,
    )
    last = done.stdout.split()[-1:] or ["none"]
    assert done.returncode == 0, f"status {done.returncode} in case {last[0]}:\n{done.stderr[-4000:]}"
    assert last == [str(cases - 1)]


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        (["generic"], ["generic"]),
        (["generic", "avx2"], ["generic", "avx2"]),
        (["generic", "avx2", "avx2_vnni"], ["generic", "avx2", "avx2_vnni"]),
        (
            ["generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx", hardware.EMULATED_AMX],
            ["generic", "avx2", "avx512_bf16", hardware.EMULATED_AMX],
        ),
        (["generic", "neon_dotprod", "neon_i8mm_bf16"], ["generic", "neon_i8mm_bf16"]),
    ],
    ids=str,
)
def test_sanitizers_watch_tiers_that_the_cpu_runs(tiers: list[str], expected: list[str]) -> None:
    assert watched(tiers) == expected
