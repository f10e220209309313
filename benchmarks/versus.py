"""Compare the speed of two checkouts of this package:

python -m benchmarks.versus ../before . bert-base-uncased:1x128=int8 all-MiniLM-L6-v2:1x32=float32

Each has a process of its own with its own kernels, which must be built, and a folder for its measurements. They take turns; the
ratio is that of the medians of one round.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from tqdm import tqdm

from hf_cpu_accel.cli.tables import wide_console

DEFAULT = tuple(
    f"{name}={dtype}"
    for name in ("bert-base-uncased:1x128", "all-MiniLM-L6-v2:1x32", "all-MiniLM-L6-v2:32x64")
    for dtype in ("float32", "bfloat16", "int8")
)
_WARM_CALLS = 12


class Checkout:
    """The package at `folder`, running one workload in a process."""

    def __init__(self, folder: Path, home: Path, row: str) -> None:
        folder = folder.resolve()
        paths = f"{folder / 'src'}{os.pathsep}{folder}"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *row.split("=")],
            cwd=folder,
            # Not the folder of this file: a checkout takes its own modules.
            env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "HF_CPU_ACCEL_HOME": str(home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> str:
        """
        Raises:
            RuntimeError: the process has ended; what it said is on standard error.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with exit code {self._process.wait()}")
        return line.strip()

    def measure(self, seconds: float) -> float:
        """Return the median seconds of a call in a burst."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return float(self.answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(name: str, dtype: str) -> None:
    """Run bursts on request, in the child process."""
    from benchmarks import workloads
    from hf_cpu_accel import accelerate_for_cpu

    workload = workloads.parse(name)
    model = workload.build()
    inputs = workload.inputs(model)
    accelerate_for_cpu(model, dtype=dtype)
    for _ in range(_WARM_CALLS):
        workload.forward(model, inputs)
    print("ready", flush=True)
    for line in sys.stdin:
        times: list[float] = []
        end = time.perf_counter() + float(line)
        while time.perf_counter() < end or len(times) < 3:
            start = time.perf_counter()
            workload.forward(model, inputs)
            times.append(time.perf_counter() - start)
        print(statistics.median(times), flush=True)


def ratios(before: Path, after: Path, row: str, homes: Path, rounds: int, seconds: float) -> list[float]:
    """Return the speedups of `after` over `before`, one per round, sorted."""
    checkouts = [Checkout(folder, homes / str(place), row) for place, folder in enumerate((before, after))]
    try:
        for checkout in checkouts:
            assert checkout.answer() == "ready"
        found = []
        for turn in range(rounds):
            order = (0, 1) if turn % 2 else (1, 0)
            taken = {place: checkouts[place].measure(seconds) for place in order}
            found.append(taken[0] / taken[1])
        return sorted(found)
    finally:
        for checkout in checkouts:
            checkout.close()


def main(
    before: Annotated[Path, typer.Argument(help="A checkout with built kernels.")],
    after: Annotated[Path, typer.Argument(help="Another checkout with built kernels.")],
    rows: Annotated[
        list[str] | None, typer.Argument(help="WORKLOAD=DTYPE, as benchmarks.run names them.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 10,
    seconds: Annotated[float, typer.Option(min=0, help="Length of a turn, in seconds.")] = 0.5,
) -> None:
    """Print the speedup of AFTER over BEFORE."""
    table = Table("workload", "dtype", "times as fast", "rounds")
    logarithms = []
    with tempfile.TemporaryDirectory() as homes:
        for row in tqdm(rows or DEFAULT, unit="row"):
            found = ratios(before, after, row, Path(homes), rounds, seconds)
            logarithms.append(math.log(statistics.median(found)))
            table.add_row(
                *row.split("="), f"{statistics.median(found):.3f}", f"{found[0]:.2f} .. {found[-1]:.2f}"
            )
    console = wide_console()
    console.print(table)
    console.print(f"geometric mean {math.exp(statistics.mean(logarithms)):.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        typer.run(main)
