"""Measure the cost of checking the first real call: `verify="first"` and `verify=True` in turns.

python -m benchmarks.first_call bert-base-uncased:1x128 vit-base:1

Accelerating with the first call may take at most one forward of the eager model more; a later call takes no more than without.
"""

from __future__ import annotations

import copy
import statistics
import time
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn
from tqdm import trange

from benchmarks import workloads
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.cli.tables import wide_console
from hf_cpu_accel.measure import interleaved, speedup

DEFAULT = (
    "all-MiniLM-L6-v2:1x32",
    "bert-base-uncased:1x128",
    "bert-base-uncased:8x128",
    "gpt2:1x64",
    "vit-base:1",
    "swin-t:1",
)
DTYPES = ("float32", "int8")
SETTINGS: tuple[bool | str, ...] = (True, "first")


def seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def begun(workload: Any, eager: nn.Module, dtype: str, verify: Any) -> tuple[nn.Module, Any]:
    """(accelerated copy, what accelerates it and calls it once)."""
    model = copy.deepcopy(eager)
    inputs = workload.inputs(eager)

    def begin() -> None:
        accelerate_for_cpu(model, dtype=dtype, verify=verify, originals="drop")
        workload.forward(model, inputs)

    return model, begin


def row(workload: Any, dtype: str, rounds: int) -> tuple[str, str, str]:
    """Return ms of an eager forward, the check's cost in forwards, and the speed of later calls with it over without."""
    eager = workload.build()
    forward = partial(workload.forward, eager, workload.inputs(eager))
    forward()
    times: dict[Any, list[float]] = {verify: [] for verify in SETTINGS}
    models: dict[Any, nn.Module] = {}
    one = []
    for turn in trange(rounds, desc=dtype, leave=False):
        for verify in SETTINGS if turn % 2 else SETTINGS[::-1]:
            models[verify], begin = begun(workload, eager, dtype, verify)
            times[verify].append(seconds(begin))
        one.append(seconds(forward))
    more = statistics.median(first - full for full, first in zip(*times.values(), strict=True))
    calls = {
        str(verify): partial(workload.forward, model, workload.inputs(eager))
        for verify, model in models.items()
    }
    later = interleaved(calls, rounds=7, calls=3, seconds=0.1)
    gain = speedup(later["True"], later["first"]).value
    return f"{1e3 * min(one):.1f}", f"{more / min(one):+.2f}", f"{gain:.2f}x"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Workloads of `benchmarks.run`.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each setting.")] = 5,
) -> None:
    """Print the cost of the first call in forwards of the eager model, and the speed of later calls."""
    table = Table(
        "workload", "dtype", "eager forward, ms", "first call costs, forwards", "later calls, speed"
    )
    torch.set_grad_enabled(False)
    for name in names or DEFAULT:
        for dtype in DTYPES:
            table.add_row(name, dtype, *row(workloads.parse(name), dtype, rounds))
    wide_console().print(table)


if __name__ == "__main__":
    typer.run(main)
