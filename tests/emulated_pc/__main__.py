"""`make test-emulated`: the checks of ops on the tiers of x86 that this CPU lacks, in an emulated PC.

What test_tiers.py checks on every tier of a CPU runs here under Linux in a PC that Bochs emulates, whose CPU has the tier. It
says whether they are right, not how fast.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from hf_cpu_accel.runtime import hardware
from tests.emulated_pc import contents, serial_port
from tests.emulated_pc.linux import MEMORY, write_disk
from tests.environments.bochs import Bochs
from tests.environments.debian import unpacked
from tests.ops.test_tiers import CHECKS

FOLDER = contents.ROOT / "build" / "test-emulated"
KERNEL_SUITE, KERNEL_PACKAGES = "bookworm", ("linux-image-amd64",)
# Bochs's name of a CPU that has the tier. None has AMX, which Bochs refuses Linux to enable: `make test-amx` has no Linux.
CPUS = {
    "avx2_vnni": "arrow_lake",
    "avx512": "corei7_skylake_x",
    "avx512_vnni": "corei7_icelake_u",
    "avx512_bf16": 'corei7_icelake_u, add_features="avx512bf16"',
}
# Without it, what the emulator is faster at would decide whether the instruction of bfloat16 is used.
VARIABLES = {"avx512_bf16": {"HF_CPU_ACCEL_BF16_DOT": "1"}}
# Nothing that this PC lacks or that costs time. Linux would divide by the frequency of the HPET, which Bochs's does not say.
LINUX = "console=ttyS0,115200 quiet hpet=disable tsc=reliable nokaslr mitigations=off random.trust_cpu=on panic=-1 rootfstype=ramfs"
DEVICES = """\
clock: sync=none
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=disk, path={disk}, mode=flat
boot: disk
com1: enabled=1, mode=file, dev={port}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiers", nargs="+", choices=list(CPUS), help="by default those that this CPU lacks")
    parser.add_argument(
        "--checks", nargs="+", choices=list(CHECKS.values()), default=list(CHECKS.values()), metavar="CHECK"
    )
    parser.add_argument("--minutes", type=float, default=60, help="at most, for each tier")
    arguments = parser.parse_args()
    flags = hardware.detect().flags
    tiers = arguments.tiers or [tier for tier in CPUS if hardware.best_tier(flags, tier) != tier]
    if not tiers:
        print("This CPU has all tiers that are emulated here: `make test` and `make test-tiers` run them.")
        return 0
    bochs, files = Bochs(FOLDER), contents.archives(FOLDER)
    failed = [
        f"{check} on {tier}: {said}"
        for tier in tiers
        for check, said in run(bochs, files, tier, arguments.checks, arguments.minutes).items()
        if said != "passed"
    ]
    print("\n".join(f"FAILED: {what}" for what in failed) or "all passed")
    return 1 if failed else 0


def run(bochs: Bochs, files: list[Path], tier: str, checks: list[str], minutes: float) -> dict[str, str]:
    """What became of each check."""
    disk, port = FOLDER / "disk", FOLDER / "serial"
    for left in (port, disk.with_name(f"{disk.name}.lock")):  # by a run that was killed
        left.unlink(missing_ok=True)
    write_disk(disk, linux(), command_line(tier, checks), files)
    print(f"{tier} on {CPUS[tier]}", flush=True)
    results, before = dict.fromkeys(checks, "did not run"), time.monotonic()
    process = bochs.start(CPUS[tier], MEMORY >> 20, DEVICES.format(disk=disk, port=port))
    try:
        for line in serial_port.lines(process, port, 60 * minutes):
            match line.split():
                case ["BEGUN"]:
                    told = "begun"
                case ["CHECK", name, said]:
                    results[name] = said
                    told = f"{name} {said}"
                case ["OVER"]:
                    break
                case _:
                    print(line, flush=True)
                    continue
            now = time.monotonic()
            print(f"{tier} {told} {now - before:.0f} s", flush=True)
            before = now
        else:
            print(f"{tier}: the PC went off: {bochs.said.read_text(errors='replace')}", flush=True)
    except TimeoutError:
        print(f"{tier}: {minutes:g} minutes are over", flush=True)
    finally:
        process.kill()
        process.wait()
    return results


def linux() -> Path:
    """Debian's kernel."""
    return next(
        (unpacked(FOLDER / "linux", KERNEL_SUITE, "amd64", KERNEL_PACKAGES) / "boot").glob("vmlinuz-*")
    )


def command_line(tier: str, checks: list[str]) -> str:
    """Of the kernel, which hands on what it does not know: environment and, behind the dashes, arguments of the first process."""
    variables = {
        "PYTHONPATH": contents.python_path(),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_CPU_ACCEL_ISA": tier,
        **VARIABLES.get(tier, {}),
    }
    given = " ".join(f"{name}={value}" for name, value in variables.items())
    return f"{LINUX} rdinit={contents.PYTHON} {given} -- -u -m tests.emulated_pc.inside {tier} {' '.join(checks)}"


if __name__ == "__main__":
    sys.exit(main())
