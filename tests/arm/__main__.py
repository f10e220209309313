"""`make test-arm`: the kernels for aarch64, cross-compiled and emulated here. It says whether they are right, not how fast.

What test_tiers.py checks on every tier runs here on the tiers of ARM, each on a CPU that has nothing above it;
then whole models do.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.arm import end_to_end
from tests.arm.machine import Machine
from tests.ops.test_tiers import CHECKS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "test-arm"
# The emulator's name of a CPU whose best tier that is. Not an ARMv8.0 for the lowest: torch's BLAS (NVPL) wants ARMv8.1 at least.
CPUS = {"generic": "a64fx", "neon_dotprod": "neoverse-n1", "neon_i8mm_bf16": "max"}
# Instructions that a tier may not have: a CPU without them would stop there.
FORBIDDEN = {
    "generic": r"\w*dot|\w*mmla|bfmlal\w|bfcvt\w*",
    "neon_dotprod": r"usdot|sudot|bfdot|\w*mmla|bfmlal\w|bfcvt\w*",
}
STEPS = ("checks", "models")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--torch", default="torch==2.13.0", help="as pip wants it; its headers compile the kernels"
    )
    parser.add_argument("--tiers", nargs="+", choices=list(CPUS), default=list(CPUS))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument(
        "--checks", nargs="+", default=list(CHECKS.values()), metavar="CHECK", help="check_linear ..."
    )
    arguments = parser.parse_args()
    machine = Machine(FOLDER, arguments.torch)
    package = build(machine)
    check_objects(machine)
    failed = []
    for tier in arguments.tiers:
        print(f"{tier} on {CPUS[tier]}", flush=True)
        if "checks" in arguments.steps and not checks_pass(machine, package, tier, arguments.checks):
            failed.append(f"checks on {tier}")
    if "models" in arguments.steps:
        failed += models_differ(machine, package, arguments.tiers)
    print("\n".join(f"FAILED: {what}" for what in failed) or "all passed")
    return 1 if failed else 0


def build(machine: Machine) -> Path:
    """The folder of a package of this source tree with kernels for aarch64."""
    folder = FOLDER / "package"
    environment = {
        **os.environ,
        "CXX": str(machine.compiler),
        "HF_CPU_ACCEL_REQUIRE_EXTENSION": "1",
        "HF_CPU_ACCEL_TIERS": "all",
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


def checks_pass(machine: Machine, package: Path, tier: str, checks: list[str]) -> bool:
    return machine.run(["-m", "tests.arm.checks", tier, *checks], CPUS[tier], python_path(package)) == 0


def models_differ(machine: Machine, package: Path, tiers: list[str]) -> list[str]:
    """What trained models give on these tiers and should not, in words."""
    machine.add(end_to_end.HOSTS)
    given, expected = end_to_end.prepare(FOLDER), FOLDER / "x86.safetensors"
    end_to_end.run_here(given, expected)
    wrong = []
    for tier in tiers:
        found = FOLDER / f"{tier}.safetensors"
        found.unlink(missing_ok=True)
        variables = {**python_path(package), **end_to_end.VARIABLES}
        if machine.run(["-m", "tests.arm.models", tier, str(given), str(found)], CPUS[tier], variables):
            wrong.append(f"models on {tier}: see above")
        else:
            wrong += [f"models on {tier}: {what}" for what in end_to_end.differences(found, expected)]
    return wrong


def python_path(package: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(map(str, (package, ROOT)))}


if __name__ == "__main__":
    sys.exit(main())
