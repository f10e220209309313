"""Compare the speed of two checkouts of this package:

python -m benchmarks.versus ../before . bert-base-uncased:1x128=int8 all-MiniLM-L6-v2:1x32=float32
python -m benchmarks.versus ../before . --baseline --geomean 0.995 --lowest 0.98

Each has a process of its own with its own kernels, which must be built, and a folder for its measurements. They take turns; the
ratio is that of the medians of one round. The workloads are those of the checkout that this runs in.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = tuple(
    f"{name}={dtype}"
    for name in ("bert-base-uncased:1x128", "all-MiniLM-L6-v2:1x32", "all-MiniLM-L6-v2:32x64")
    for dtype in ("float32", "bfloat16", "int8")
)
_WARM_CALLS, _WARM_SECONDS = 12, 2.0  # whichever ends first, but two calls at least
_ACCELERATIONS = 3

Pair = tuple[float, float]
"""A number of each checkout, before and after."""


@dataclass(frozen=True)
class Comparison:
    """The measurements of one workload.

    Attributes:
        row: the workload and the dtype.
        ratios: how many times as fast the calls are, one per round, sorted.
        accelerations: seconds of `accelerate_for_cpu`, the minimum of its calls.
        first_calls: seconds of the first call after it, which verifies and records layers; the minimum.
        imports: seconds of `import hf_cpu_accel` in a process that has loaded torch.
    """

    row: str
    ratios: list[float]
    accelerations: Pair
    first_calls: Pair
    imports: Pair

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def and_again(self, other: Comparison) -> Comparison:
        """Return both measurements of a workload as one."""
        return Comparison(
            self.row,
            sorted(self.ratios + other.ratios),
            _least(self.accelerations, other.accelerations),
            _least(self.first_calls, other.first_calls),
            _least(self.imports, other.imports),
        )


class Checkout:
    """The package at `folder`, running one workload in a process.

    Attributes:
        seconds_to_import: how long importing the package took.
    """

    def __init__(self, folder: Path, home: Path, row: str) -> None:
        folder = folder.resolve()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *row.split("=")],
            cwd=folder,
            # The package of that checkout, and the workloads of this one.
            env={
                **os.environ,
                "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{ROOT}",
                "PYTHONSAFEPATH": "1",
                "HF_CPU_ACCEL_HOME": str(home),
                "TQDM_DISABLE": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        (self.seconds_to_import,) = self._answer()

    def _answer(self) -> list[float]:
        """
        Raises:
            RuntimeError: the process has ended; what it said is on standard error.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with exit code {self._process.wait()}")
        return [float(number) for number in line.split()]

    def _ask(self, command: str) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def accelerate(self) -> list[float]:
        """Return the seconds of `accelerate_for_cpu` on the original model, and of the first call."""
        return self._ask("accelerate")

    def measure(self, seconds: float) -> float:
        """Return the median seconds of a call in a burst."""
        return self._ask(str(seconds))[0]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(name: str, dtype: str) -> None:
    """Run bursts on request, in the child process."""
    import torch  # noqa: F401  (its import is not what is measured)

    imports = _seconds(lambda: __import__("hf_cpu_accel").accelerate_for_cpu)
    from benchmarks import workloads
    from hf_cpu_accel import accelerate_for_cpu, restore

    workload = workloads.parse(name)
    model = workload.build()
    inputs = workload.inputs(model)
    print(imports, flush=True)
    calls = 0
    for line in sys.stdin:
        if line.strip() == "accelerate":
            restore(model)
            taken = _seconds(lambda: accelerate_for_cpu(model, dtype=dtype))
            print(taken, _seconds(lambda: workload.forward(model, inputs)), flush=True)
            calls = 0
            continue
        end = time.perf_counter() + _WARM_SECONDS
        while calls < 2 or (calls < _WARM_CALLS and time.perf_counter() < end):
            workload.forward(model, inputs)
            calls += 1
        calls = _WARM_CALLS
        times: list[float] = []
        end = time.perf_counter() + float(line)
        while time.perf_counter() < end or not times:
            times.append(_seconds(lambda: workload.forward(model, inputs)))
        print(statistics.median(times), flush=True)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(before: Path, after: Path, row: str, homes: Path, rounds: int, seconds: float) -> Comparison:
    """Measure a workload in both checkouts in turns."""
    checkouts: list[Checkout] = []
    try:
        # One after the other: what is imported takes turns, too.
        for place, folder in enumerate((before, after)):
            checkouts.append(Checkout(folder, homes / str(place), row))
        imports = checkouts[0].seconds_to_import, checkouts[1].seconds_to_import
        made = [_turn(turn, checkouts, Checkout.accelerate) for turn in range(_ACCELERATIONS)]
        bursts = [_turn(turn, checkouts, lambda one: [one.measure(seconds)]) for turn in range(rounds)]
    finally:
        for checkout in checkouts:
            checkout.close()
    accelerations, first_calls = (
        (min(one[number] for one, _ in made), min(other[number] for _, other in made)) for number in (0, 1)
    )
    ratios = sorted(old[0] / new[0] for old, new in bursts)
    return Comparison(row, ratios, accelerations, first_calls, imports)


def _turn(
    turn: int, checkouts: list[Checkout], ask: Callable[[Checkout], list[float]]
) -> tuple[list[float], list[float]]:
    """Return the answers of both checkouts; the first to be asked alternates."""
    answers = {place: ask(checkouts[place]) for place in ((0, 1) if turn % 2 else (1, 0))}
    return answers[0], answers[1]


def _least(one: Pair, other: Pair) -> Pair:
    return min(one[0], other[0]), min(one[1], other[1])


def main(
    before: Annotated[Path, typer.Argument(help="A checkout with built kernels.")],
    after: Annotated[Path, typer.Argument(help="Another checkout with built kernels.")],
    rows: Annotated[
        list[str] | None, typer.Argument(help="WORKLOAD=DTYPE, as benchmarks.run names them.")
    ] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="The 24 workloads of the baseline.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 10,
    seconds: Annotated[float, typer.Option(min=0, help="Length of a turn, in seconds.")] = 0.5,
    geomean: Annotated[
        float, typer.Option(min=0, help="Least geometric mean of the speedups; below it the exit code is 1.")
    ] = 0.0,
    lowest: Annotated[
        float,
        typer.Option(
            min=0,
            help="Least speedup of a workload; below it the workload is measured again, then the exit code is 1.",
        ),
    ] = 0.0,
) -> None:
    """Print the speedup of AFTER over BEFORE."""
    from benchmarks.workloads import BASELINE
    from hf_cpu_accel.cli.tables import wide_console

    found: list[Comparison] = []
    with tempfile.TemporaryDirectory() as homes:
        for row in tqdm([*(rows or ()), *(BASELINE if baseline else () if rows else DEFAULT)], unit="row"):
            one = compare(before, after, row, Path(homes), rounds, seconds)
            if one.ratio < lowest:  # where memory lies differs from process to process
                one = one.and_again(compare(before, after, row, Path(homes), 2 * rounds, seconds))
            found.append(one)
            tqdm.write(f"{row}  {one.ratio:.3f}")
    console = wide_console()
    console.print(_table(found))
    mean, least = summary(found)
    console.print(f"geometric mean {mean:.3f}, lowest {least.ratio:.3f} ({least.row})")
    for name, pairs in (
        ("accelerate", [one.accelerations for one in found]),
        ("first call", [one.first_calls for one in found]),
        ("import", [one.imports for one in found]),
    ):
        ratio = statistics.geometric_mean(old / new for old, new in pairs)
        console.print(f"{name}: times as fast {ratio:.3f}, geometric mean")
    if mean < geomean or least.ratio < lowest:
        raise typer.Exit(1)


def summary(found: list[Comparison]) -> tuple[float, Comparison]:
    """Return the geometric mean of the speedups, and the workload with the lowest."""
    mean = statistics.geometric_mean(one.ratio for one in found)
    return mean, min(found, key=lambda one: one.ratio)


def _table(found: list[Comparison]) -> Table:
    table = Table(
        "workload", "dtype", "times as fast", "rounds", "accelerate ms", "first call ms", "import ms"
    )
    for one in found:
        pairs = (one.accelerations, one.first_calls, one.imports)
        table.add_row(
            *one.row.split("="),
            f"{one.ratio:.3f}",
            f"{one.ratios[0]:.2f} .. {one.ratios[-1]:.2f}",
            *(f"{1e3 * old:.0f} -> {1e3 * new:.0f}" for old, new in pairs),
        )
    return table


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        typer.run(main)
