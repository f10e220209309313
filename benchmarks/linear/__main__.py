"""Compare the packed GEMM of one linear layer with every packed GEMM of torch, as a share of this machine's measured peak.

python -m benchmarks.linear 128x768x768 128x768x3072 --dtypes float32,int8
python -m benchmarks.linear --grid            the project's goals: some five minutes on an idle machine

In a model a layer's weight is not in the near cache when its turn comes. So each provider gets several copies of the
weight, `--footprint` megabytes of them in float32, and each call goes through all; `--footprint 0` keeps one copy hot.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from benchmarks import kernels
from benchmarks.kernels import PARTIAL, Cell
from benchmarks.linear.providers import PROVIDERS, usable
from hf_cpu_accel.cli.tables import wide_console
from hf_cpu_accel.measure import Agreement, compare
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.runtime.threads import apply_threads

# BERT-base's projections and FFN at 128 and 1024 tokens, MiniLM's at 32: M x K x N
DEFAULT = ("128x768x768", "128x768x3072", "128x3072x768", "1024x768x768", "32x384x1536", "1x768x768")
_GRID_KN = ("768x768", "768x2304", "768x3072", "3072x768", "1024x4096", "4096x1024")
GRID = tuple(f"{m}x{kn}" for kn in _GRID_KN for m in (32, 128, 512, 1024))


def copies(footprint: int, k: int, n: int) -> int:
    """Return the number of float32 weights [n, k] in `footprint` bytes, at least one."""
    return max(1, footprint // (4 * k * n))


def measure(case: str, dtype: str, *, footprint: int, rounds: int, seconds: float) -> list[Cell]:
    """Return the time per layer and the agreement with float64, for each provider of one dtype.

    Args:
        case: "MxKxN" of [M, K] x [K, N].
        footprint: bytes of float32 weights that one call goes through.
    """
    m, k, n = (int(size) for size in case.split("x"))
    native = PROVIDERS[dtype][0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, k, generator=generator)
    count = copies(footprint, k, n)
    weights = [torch.randn(n, k, generator=generator) / k**0.5 for _ in range(count)]
    bias = torch.randn(n, generator=generator)
    truth = torch.nn.functional.linear(x.double(), weights[0].double(), bias.double())
    inputs, native_bias = x.to(native), bias.to(native)
    passes: dict[str, Callable[[], object]] = {}
    agreement: dict[str, Agreement] = {}
    with torch.inference_mode():
        for name, provider in usable(dtype).items():
            layers = [provider(weight.to(native), native_bias, inputs) for weight in weights]
            agreement[name] = compare([layers[0](inputs)], [truth])
            passes[name] = lambda layers=layers: [layer(inputs) for layer in layers]  # type: ignore[misc]
        return kernels.measure(
            case,
            dtype,
            passes,
            agreement,
            layers=count,
            operations=2.0 * m * k * n,
            peak_dtype=dtype,
            rounds=rounds,
            seconds=seconds,
        )


def main(
    shapes: Annotated[
        list[str] | None, typer.Argument(metavar="MxKxN", help=f"[default: {' '.join(DEFAULT)}]")
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help=f"Instead: {len(GRID)} shapes of encoders.")] = False,
    dtypes: Annotated[str, typer.Option(help=f"Any of {', '.join(PROVIDERS)}.")] = ",".join(PROVIDERS),
    footprint: Annotated[int, typer.Option(min=0, help="Megabytes of float32 weights per pass.")] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(min=0, help="Minimum length of a burst, in seconds.")] = 0.05,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Print microseconds, GFLOP/s and the share of the peak per shape, dtype and provider, and a summary."""
    if grid and shapes:
        raise typer.BadParameter(f"--grid and shapes ({' '.join(shapes)}): give one of them")
    for text in shapes or ():
        if re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text) is None:
            raise typer.BadParameter(f"shape {text!r} is not of the form MxKxN, e.g. {DEFAULT[0]}")
    wanted = dtypes.split(",")
    unknown = [dtype for dtype in wanted if dtype not in PROVIDERS]
    if unknown:
        raise typer.BadParameter(f"dtypes {unknown} are not known; accepted: {', '.join(PROVIDERS)}")
    choice = apply_threads(threads)
    console = wide_console()
    console.print(f"{choice.count} threads; peaks: {hardware.measure_peaks(choice.count)}")
    console.print(
        f"A provider whose name ends in{PARTIAL} gets activations in int8 already; ours quantizes them itself."
    )
    cells: list[Cell] = []
    for case in GRID if grid else shapes or DEFAULT:
        found = [
            cell
            for dtype in wanted
            for cell in measure(case, dtype, footprint=footprint << 20, rounds=rounds, seconds=seconds)
        ]
        _, k, n = (int(size) for size in case.split("x"))
        console.print(
            kernels.table(f"{case}, {_weights(copies(footprint << 20, k, n), 4e-6 * k * n)}", found)
        )
        cells += found
    console.print(kernels.summary_table(cells))


def _weights(count: int, megabytes: float) -> str:
    if count == 1:
        return f"hot weight: one of {megabytes:.1f} MB in float32, used again at once"
    return f"cold weights: {count} of {megabytes:.1f} MB in float32, in turn"


if __name__ == "__main__":
    typer.run(main)
