"""`make fuzz`: random calls of every op, good and bad, on every instruction-set tier that this CPU runs.

    python -m tests.ops.fuzz --cases 10000 --seed 0 --isa avx2 --op attention

The cases of each tier run in a process of their own, since the tier is chosen once, at load. One that crashes is reported with its
number like one that fails, and the rest go on behind it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator

from tqdm import tqdm

from hf_cpu_accel.runtime import hardware
from tests.ops.fuzz.worker import FAMILIES, FUNCTIONS


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description="Random calls of every op, good and bad.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--isa", choices=tiers(), action="append", help="default: all that this CPU runs")
    parser.add_argument(
        "--op", choices=[*FAMILIES, FUNCTIONS], action="append", help="family of ops, default: all"
    )
    options = parser.parse_args()
    failures, isas = [], options.isa or tiers()
    with tqdm(total=options.cases, unit="case", disable=None) as bar:
        for place, isa in enumerate(isas):
            first, end = (options.seed + options.cases * i // len(isas) for i in (place, place + 1))
            bar.set_description(isa)
            for failure in run_tier(isa, first, end, options.op or [], bar):
                failures.append(failure)
                bar.write(f"{isa}: {failure}")
    print(f"{options.cases} cases on {', '.join(isas)}: {len(failures)} failed")
    return 1 if failures else 0


def tiers() -> list[str]:
    flags = hardware.detect().flags
    return [
        tier for tier in (*hardware.TIERS, hardware.EMULATED_AMX) if hardware.best_tier(flags, tier) == tier
    ]


def run_tier(isa: str, first: int, end: int, families: list[str], bar: tqdm) -> Iterator[str]:
    """What went wrong in cases [first, end)."""
    while first < end:
        command = [sys.executable, "-m", "tests.ops.fuzz.worker", f"--seed={first}", f"--cases={end - first}"]
        command += [f"--op={family}" for family in families]
        environment = {**os.environ, "HF_CPU_ACCEL_ISA": isa}
        with subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as worker:
            assert worker.stdout is not None
            number, said = first - 1, list[str]()
            for line in worker.stdout:
                if line.strip().isdigit():
                    bar.update(int(line) - number)
                    number = int(line)
                else:
                    said.append(line)
        if worker.returncode in (0, 1):
            first = end
        else:
            said.append(f"case {number} ended the process with {worker.returncode}\n")
            first = number + 1
        if said:
            yield "".join(said)
        elif worker.returncode:
            yield f"the process ended with {worker.returncode}"


if __name__ == "__main__":
    sys.exit(main())
