"""`python -m benchmarks.soak --minutes 30 --cycles 1000`: prints its findings; the exit status is 1 after a failure."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.soak.run import Report

# Rows of one text may be computed by another provider from one call to the next, and then differ by rounding.
os.environ.setdefault("HF_CPU_ACCEL_PROVIDERS", "own")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--cycles", type=int, default=1000, help="cycles of accelerate and restore on one model, at the end"
    )
    parser.add_argument(
        "--requests", type=int, default=300, help="requests to each of the two models of a round"
    )
    parser.add_argument(
        "--crowd",
        type=int,
        default=10_000,
        help="requests to each model by four and by eight clients, at the end",
    )
    arguments = parser.parse_args()
    from benchmarks.soak.memory import MOST_GROWTH
    from benchmarks.soak.run import Soak, crowds, cycles, until
    from benchmarks.soak.served import SERVED

    soaked = Soak().run(until(60 * arguments.minutes), arguments.requests)
    _print("rounds", soaked)
    served = SERVED["encoder"]
    cycled = cycles(served, served.build(), arguments.cycles)
    _print("cycles", cycled)
    crowded = crowds(arguments.crowd)
    print(f"crowds: {crowded.answered} outputs, {len(crowded.failures)} wrong")
    is_right = not soaked.failures and not cycled.failures and not crowded.failures
    return 0 if is_right and max(soaked.growth(), cycled.growth()) <= MOST_GROWTH else 1


def _print(name: str, report: Report) -> None:
    first, last = report.held[0], report.held[-1]
    print(
        f"{name}: {report.answered} answers, {len(report.failures)} wrong, memory {report.growth():+.2%} after the warm-up"
    )
    print(
        f"  resident {first.resident / 1e6:.1f} -> {last.resident / 1e6:.1f} MB, objects {first.objects} -> {last.objects}, "
        f"files {first.files} -> {last.files}"
    )
    if first.used is not None and last.used is not None:
        print(f"  allocated by glibc {first.used / 1e6:.1f} -> {last.used / 1e6:.1f} MB")
    for failure in report.failures[:20]:
        print(f"  {failure}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
