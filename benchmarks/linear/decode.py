"""Compare the rate at which a linear layer with few rows reads its weight with the read bandwidth of memory.

python -m benchmarks.linear.decode 8192x2048 --rows 1,8

A decoder reads all its weights for every token. So the calls cycle through as many copies of the weight as fill `--footprint`,
more than any cache holds. The rate of bytes is compared with plain reads before and after.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
import typer

from hf_cpu_accel.cli.tables import results_table, wide_console
from hf_cpu_accel.config import INT4_GROUPS
from hf_cpu_accel.measure import interleaved
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import DTYPES, PackedWeight, allocate, pack_linear
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.runtime.threads import apply_threads

DEFAULT = ("2048x8192", "8192x2048")  # N x K: the projections of Llama-3.2-1B's FFN
_GROUPED = ("int4", "affine4", "affine8")
WEIGHTS = (*DTYPES[:-1], *(f"{dtype} g{group}" for dtype in _GROUPED for group in INT4_GROUPS))


def copies(weight: str, n: int, k: int, footprint: int) -> list[PackedWeight]:
    """Return copies of a packed [n, k] that fill `footprint` bytes, at least two."""
    dtype, _, group = weight.partition(" g")
    matrix = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) / k**0.5
    first = pack_linear(matrix, dtype, int4_group=int(group or 32))
    like = first.data
    others = (
        replace(first, data=allocate(like.shape, like.dtype).copy_(like))
        for _ in range(max(1, footprint // first.nbytes - 1))
    )
    return [first, *others]


def measure(
    case: str, weight: str, rows: list[int], *, footprint: int, rounds: int
) -> list[tuple[int, float, float]]:
    """Return (rows, GB/s, percentage of the read bandwidth) of one shape and kind of weight."""
    n, k = (int(size) for size in case.split("x"))
    layers = copies(weight, n, k, footprint)
    inputs = {m: torch.randn(m, k, generator=torch.Generator().manual_seed(m)) for m in rows}

    def all_of(x: torch.Tensor) -> None:
        for layer in layers:
            linear(x, layer)

    def bandwidth() -> float:
        return float(torch.ops.hf_cpu_accel.measure_read_bandwidth(torch.get_num_threads(), 1024))

    before = bandwidth()
    timings = interleaved(
        {str(m): partial(all_of, inputs[m]) for m in rows}, rounds=rounds, calls=1, seconds=0.0
    )
    most, nbytes = max(before, bandwidth()), sum(layer.nbytes for layer in layers)
    rates = {m: 1e-9 * nbytes / timings[str(m)].seconds.value for m in rows}
    return [(m, rate, 100 * rate / most) for m, rate in rates.items()]


def main(
    shapes: Annotated[
        list[str] | None, typer.Argument(metavar="NxK", help=f"[default: {' '.join(DEFAULT)}]")
    ] = None,
    weights: Annotated[str, typer.Option(help=f"Any of {', '.join(WEIGHTS)}.")] = ",".join(WEIGHTS),
    rows: Annotated[str, typer.Option(help="Comma-separated numbers of rows of the input.")] = "1,2,4,8,16",
    footprint: Annotated[int, typer.Option(min=1, help="Megabytes of packed weights.")] = 640,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Print GB/s and the percentage of the read bandwidth per shape, kind of weight and number of rows."""
    wanted, counts = weights.split(","), [int(m) for m in rows.split(",")]
    unknown = [weight for weight in wanted if weight not in WEIGHTS]
    if unknown:
        raise typer.BadParameter(f"weights {unknown} are not known; accepted: {', '.join(WEIGHTS)}")
    choice = apply_threads(threads)
    console = wide_console()
    console.print(f"{choice.count} threads; peaks: {hardware.measure_peaks(choice.count)}")
    for case in shapes or DEFAULT:
        out = results_table(
            ("weight", *(f"{m} rows\nGB/s (%)" for m in counts)),
            f"{case}, {footprint} MB of weights in turn; % of plain reads",
        )
        for weight in wanted:
            found = measure(case, weight, counts, footprint=footprint << 20, rounds=rounds)
            out.add_row(weight, *(f"{rate:.1f} ({share:.0f})" for _, rate, share in found))
        console.print(out)


if __name__ == "__main__":
    typer.run(main)
