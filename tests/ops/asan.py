"""Runs the random calls of fuzz/, and what test_tiers.py checks on every tier, with the kernels that `make asan` built, under
AddressSanitizer and UndefinedBehaviorSanitizer: of the tiers that this CPU runs, on the lowest and the highest one of vectors, on
avx2, whose products of integers are others than those of tiers with VNNI, and on emulated tiles.

Their library must not lie in the package: the folder of the package is linked together anew around it. AddressSanitizer has to be
loaded before Python; leaks are not looked for, since Python and torch keep what they have until the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import hf_cpu_accel
from hf_cpu_accel.runtime import hardware
from tests.ops.test_tiers import all_checks, available

REPOSITORY = Path(__file__).parents[2]
LIBRARY = REPOSITORY / "build" / "asan" / "_C.abi3.so"


def watched(tiers: list[str]) -> list[str]:
    """Those of `tiers`, which go from the lowest to the highest, that the calls run on."""
    vectors = [tier for tier in tiers if tier not in ("amx", hardware.EMULATED_AMX)]
    wanted = {vectors[0], "avx2", vectors[-1], hardware.EMULATED_AMX}
    return [tier for tier in tiers if tier in wanted]


def main(cases: str) -> int:
    if not LIBRARY.exists():
        print(f"{LIBRARY} is not there: run `make asan`, which builds it")
        return 2
    compiler = os.environ.get("CXX", "g++")
    # Python itself has no C++ runtime: AddressSanitizer would not find the one to hook exceptions of.
    runtimes = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "hf_cpu_accel"
        package.mkdir()
        for entry in Path(hf_cpu_accel.__file__).parent.iterdir():
            if not entry.name.startswith("_C"):
                (package / entry.name).symlink_to(entry)
        (package / LIBRARY.name).symlink_to(LIBRARY)
        for tier in watched(available):
            environment = {
                **os.environ,
                "LD_PRELOAD": " ".join(runtimes),
                "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
                "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
                "HF_CPU_ACCEL_ISA": tier,
                "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}",
            }
            fuzz = [sys.executable, "-m", "tests.ops.fuzz", "--cases", cases, "--isa", tier]
            kernels = [sys.executable, "-c", all_checks(tier)]
            for command in (fuzz, kernels):
                if code := subprocess.run(command, env=environment).returncode:
                    return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "5000"))
