"""Compare the attention kernel with F.scaled_dot_product_attention, as a share of this machine's measured float32 peak.

python -m benchmarks.attention
python -m benchmarks.attention 8x12x128x64 --dtypes bfloat16

The share is of the float32 peak for both dtypes, since softmax and sums are float32 in both.
"""

from __future__ import annotations

import re
from typing import Annotated

import torch
import typer

from benchmarks import kernels
from benchmarks.kernels import OURS, Cell
from hf_cpu_accel.cli.tables import wide_console
from hf_cpu_accel.measure import compare
from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.runtime.threads import apply_threads

# BERT-base at 32, 128 and 512 tokens and as a batch, MiniLM's batch: batch x heads x tokens x head dimension
DEFAULT = ("1x12x32x64", "1x12x128x64", "8x12x128x64", "1x12x512x64", "32x12x64x32")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measure(case: str, dtype: str, *, rounds: int, seconds: float) -> list[Cell]:
    """Return the time of one call and the agreement with float64, for both providers.

    Args:
        case: "BxHxLxD"; queries, keys and values are the transposed views [B, H, L, D] of one projection's
            output [B, L, 3 * H * D], as in a model.
    """
    batch, heads, tokens, width = (int(size) for size in case.split("x"))
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(batch, tokens, 3, heads, width, generator=generator).to(DTYPES[dtype])
    query, key, value = (projected[:, :, part].transpose(1, 2) for part in range(3))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    truth = sdpa(query.double(), key.double(), value.double()).transpose(1, 2)
    with torch.inference_mode():
        passes = {
            # The copy is part of it: the output projection wants [B, L, H * D], which ours writes at once.
            "F.sdpa": lambda: sdpa(query, key, value).transpose(1, 2).contiguous(),
            OURS: lambda: attention(query, key, value),
        }
        agreement = {name: compare([call()], [truth]) for name, call in passes.items()}
        return kernels.measure(
            case,
            dtype,
            passes,
            agreement,
            layers=1,
            operations=4.0 * batch * heads * tokens * tokens * width,
            peak_dtype="float32",
            rounds=rounds,
            seconds=seconds,
        )


def main(
    shapes: Annotated[
        list[str] | None, typer.Argument(metavar="BxHxLxD", help=f"[default: {' '.join(DEFAULT)}]")
    ] = None,
    dtypes: Annotated[str, typer.Option(help=f"Any of {', '.join(DTYPES)}.")] = ",".join(DTYPES),
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    seconds: Annotated[float, typer.Option(min=0, help="Minimum length of a burst, in seconds.")] = 0.1,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Print microseconds, GFLOP/s and the share of the float32 peak per shape and dtype, and a summary."""
    for text in shapes or ():
        if re.fullmatch(r"([1-9]\d*x){3}[1-9]\d*", text) is None:
            raise typer.BadParameter(f"shape {text!r} is not of the form BxHxLxD, e.g. {DEFAULT[0]}")
    wanted = dtypes.split(",")
    unknown = [dtype for dtype in wanted if dtype not in DTYPES]
    if unknown:
        raise typer.BadParameter(f"dtypes {unknown} are not known; accepted: {', '.join(DTYPES)}")
    choice = apply_threads(threads)
    console = wide_console()
    console.print(f"{choice.count} threads; peaks: {hardware.measure_peaks(choice.count)}")
    cells: list[Cell] = []
    for case in shapes or DEFAULT:
        found = [cell for dtype in wanted for cell in measure(case, dtype, rounds=rounds, seconds=seconds)]
        console.print(kernels.table(f"{case}, batch x heads x tokens x head dimension", found))
        cells += found
    console.print(kernels.summary_table(cells))


if __name__ == "__main__":
    typer.run(main)
