"""`make test-arm`: the kernels for aarch64, cross-compiled and emulated here. It says whether they are right, not how fast.

What test_tiers.py checks on every tier runs here on the tiers of ARM, each on a CPU that has nothing above it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.arm.machine import Machine
from tests.ops.test_tiers import CHECKS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "test-arm"
# The emulator's name of a CPU whose best tier that is.
CPUS = {"generic": "cortex-a57", "neon_dotprod": "neoverse-n1", "neon_i8mm_bf16": "max"}
# Instructions that a tier may not have: a CPU without them would stop there.
FORBIDDEN = {
    "generic": r"\w*dot|\w*mmla|bfmlal\w|bfcvt\w*",
    "neon_dotprod": r"usdot|sudot|bfdot|\w*mmla|bfmlal\w|bfcvt\w*",
}
SEED = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--torch", default="torch==2.13.0", help="as pip wants it; its headers compile the kernels"
    )
    parser.add_argument("--tiers", nargs="+", choices=list(CPUS), default=list(CPUS))
    parser.add_argument(
        "--checks", nargs="+", default=list(CHECKS.values()), metavar="CHECK", help="check_linear ..."
    )
    arguments = parser.parse_args()
    machine = Machine(FOLDER, arguments.torch)
    package = build(machine)
    check_objects(machine)
    failed = [tier for tier in arguments.tiers if not passes(machine, package, tier, arguments.checks)]
    print(f"{len(arguments.tiers) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def build(machine: Machine) -> Path:
    """The folder of a package of this source tree with kernels for aarch64."""
    folder = FOLDER / "package"
    environment = {
        **os.environ,
        "CXX": str(machine.compiler),
        "HF_CPU_ACCEL_REQUIRE_EXTENSION": "1",
        "HF_CPU_ACCEL_TORCH_ROOT": str(machine.torch),
    }
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", FOLDER / "library"]
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "hf_cpu_accel").mkdir(parents=True)
    for entry in (*(ROOT / "src/hf_cpu_accel").iterdir(), *(FOLDER / "library/hf_cpu_accel").iterdir()):
        if entry.parent.parent == FOLDER / "library" or not entry.name.startswith("_C"):
            (folder / "hf_cpu_accel" / entry.name).symlink_to(entry)
    return folder


def check_objects(machine: Machine) -> None:
    """No tier's object has an instruction of a higher tier, and the higher ones have theirs."""
    instructions = {
        tier: machine.instructions(ROOT / f"build/kernels-aarch64/tier_{tier}.o") for tier in CPUS
    }
    for tier, pattern in FORBIDDEN.items():
        found = {name for name in instructions[tier] if re.fullmatch(pattern, name)}
        assert not found, f"tier {tier} has instructions of a higher one: {', '.join(sorted(found))}"
    assert "sdot" in instructions["neon_dotprod"]
    assert {"sdot", "smmla", "bfdot", "bfmmla"} <= instructions["neon_i8mm_bf16"]


def passes(machine: Machine, package: Path, tier: str, checks: list[str]) -> bool:
    """Runs them one after another in one process, since torch takes half a minute to import."""
    calls = "\n".join(
        f"from {module} import {check}\nstart = time.time()\n{check}(seed={SEED})\n"
        f"print({check!r}, round(time.time() - start), 's', flush=True)"
        for module, check in CHECKS.items()
        if check in checks
    )
    code = f"""
import time, torch
from hf_cpu_accel import extension
from hf_cpu_accel.runtime import hardware
torch.set_num_threads(1)
tier = extension.status().tier
assert tier == hardware.detect().tier == {tier!r}, (extension.status(), hardware.detect())
{calls}
"""
    print(f"{tier} on {CPUS[tier]}", flush=True)
    paths = os.pathsep.join(map(str, (package, ROOT)))
    return machine.run(["-c", code], CPUS[tier], {"PYTHONPATH": paths}) == 0


if __name__ == "__main__":
    sys.exit(main())
