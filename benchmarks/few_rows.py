"""Check that nothing is slower than eager at few tokens: twelve models, one sequence of 1 to 64 tokens, three dtypes.

python -m benchmarks.few_rows

One text is a few rows of every product: the time goes into reading weights and into calls, not into arithmetic. Each cell is
compared with eager of the same input dtype (int8 with float32), in turns within one process.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import nn
from tqdm import tqdm

from benchmarks import workloads
from benchmarks.workloads.media import Media
from benchmarks.workloads.writing import Writing
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.cli.tables import wide_console
from hf_cpu_accel.measure import interleaved, speedup

MODELS = (
    "all-MiniLM-L6-v2",
    "bert-base-uncased",
    "distilbert-base-uncased",
    "albert-base-v2",
    "electra-small-discriminator",
    "mpnet-base",
    "deberta-v3-small",
    "ModernBERT-base",
    "mobilebert-uncased",
    "roformer_chinese_base",
    "gpt2",
    "SmolLM2-135M",
)
ROWS = (1, 2, 3, 4, 8, 16, 64)
DTYPES = ("float32", "bfloat16", "int8")
BOUND = 0.97


def eager_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of the eager model that `dtype` is compared with."""
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def forward(workload: workloads.Workload, model: nn.Module, inputs: dict[str, torch.Tensor]) -> object:
    return workload.forward(model, inputs)


def cells(
    name: str, rows: list[int], dtypes: list[str], rounds: int, seconds: float
) -> Iterator[tuple[str, int, float]]:
    """Return (dtype, rows, speedup over eager) of one model."""
    for dtype in dtypes:
        first = _workload(name, rows[0])
        eager = first.build().to(eager_dtype(dtype))
        ours = accelerate_for_cpu(copy.deepcopy(eager), dtype=dtype)
        for count in rows:
            workload = _workload(name, count)
            inputs = workload.inputs(eager)
            calls = {
                "eager": partial(forward, workload, eager, inputs),
                "ours": partial(forward, workload, ours, inputs),
            }
            for _ in range(3):  # what is measured at first use, is
                calls["ours"]()
            timings = interleaved(calls, rounds=rounds, calls=3, seconds=seconds)
            yield dtype, count, speedup(timings["eager"], timings["ours"]).value


def _workload(name: str, rows: int) -> workloads.Workload:
    found = workloads.parse(f"{name}:1x{rows}")
    assert not isinstance(found, Media | Writing)
    return found


def main(
    models: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(MODELS)}; all if none.")] = None,
    rows: Annotated[str, typer.Option(help="Comma-separated numbers of tokens of the sequence.")] = ",".join(
        map(str, ROWS)
    ),
    dtypes: Annotated[str, typer.Option(help="Comma-separated dtypes of the packed weights.")] = ",".join(
        DTYPES
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each system.")] = 7,
    seconds: Annotated[float, typer.Option(min=0, help="Minimum length of a turn, in seconds.")] = 0.03,
) -> None:
    """Print the speedup of each cell over eager, and the lowest; exit with 1 if one is below the bound."""
    counts = [int(count) for count in rows.split(",")]
    table = Table("model", "dtype", *(f"{count} rows" for count in counts))
    worst, logarithms = (math.inf, ""), []
    for name in tqdm(models or MODELS, unit="model"):
        gains: dict[str, list[float]] = {}
        for dtype, count, gain in cells(name, counts, dtypes.split(","), rounds, seconds):
            gains.setdefault(dtype, []).append(gain)
            logarithms.append(math.log(gain))
            worst = min(worst, (gain, f"{name}, {dtype}, {count} rows"))
        for dtype, values in gains.items():
            table.add_row(name, dtype, *(f"{'[red]' if v < BOUND else ''}{v:.2f}" for v in values))
    console = wide_console()
    console.print(table)
    mean = math.exp(sum(logarithms) / len(logarithms))
    console.print(f"geometric mean {mean:.2f}, worst {worst[0]:.2f} ({worst[1]})")
    raise typer.Exit(worst[0] < BOUND)


if __name__ == "__main__":
    typer.run(main)
