"""One linear layer: our packed GEMM against torch's, as a share of this machine's measured peak.

python -m benchmarks.linear 128x768x768 128x768x3072 --dtypes float32,int8

Each provider gets its own copies of the weight, `--footprint` megabytes of them in float32, and each call
goes through all: in a model a layer's weight is not in the near cache when its turn comes either.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_cpu_accel import hardware
from hf_cpu_accel.measure import Agreement, Timing, compare, interleaved
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing import pack_linear
from hf_cpu_accel.runtime.threads import apply_threads

# BERT-base's projections and FFN at 128 and 1024 tokens, MiniLM's at 32: M x K x N
DEFAULT = ("128x768x768", "128x768x3072", "128x3072x768", "1024x768x768", "32x384x1536", "1x768x768")
# A provider turns (weight [N, K], bias [N], M) into x -> x W^T + b.
Provider = Callable[[Tensor, Tensor, int], Callable[[Tensor], Tensor]]


def _torch_linear(weight: Tensor, bias: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _onednn_packed(weight: Tensor, bias: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    pointwise = torch.ops.mkldnn._linear_pointwise
    return lambda x: pointwise(x, packed, bias, "none", [], "")


def _torch_int8(weight: Tensor, bias: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data, layer.bias.data = weight, bias
    module = torch.nn.Sequential(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and still what many people run
        return torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear}, torch.qint8)


def _ours(dtype: str) -> Provider:
    def make(weight: Tensor, bias: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
        packed = pack_linear(weight, dtype)
        return lambda x: linear(x, packed, bias)

    return make


# dtype -> (dtype of the activations, providers by name)
PROVIDERS: dict[str, tuple[torch.dtype, dict[str, Provider]]] = {
    "float32": (
        torch.float32,
        {"F.linear": _torch_linear, "oneDNN": _onednn_packed, "ours": _ours("float32")},
    ),
    "bfloat16": (
        torch.bfloat16,
        {"F.linear": _torch_linear, "oneDNN": _onednn_packed, "ours": _ours("bfloat16")},
    ),
    "int8": (torch.float32, {"quantize_dynamic": _torch_int8, "ours": _ours("int8")}),
}


def measure(
    shape: tuple[int, int, int], dtype: str, *, footprint: int, rounds: int, seconds: float
) -> dict[str, tuple[Timing, Agreement]]:
    """Time per layer and agreement with float64, for each provider of one dtype.

    Args:
        shape: (M, K, N) of [M, K] x [K, N].
        footprint: bytes of float32 weights that one call goes through.
    """
    m, k, n = shape
    activation_dtype, providers = PROVIDERS[dtype]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, k, generator=generator)
    count = max(1, footprint // (4 * k * n))
    weights = [torch.randn(n, k, generator=generator) / k**0.5 for _ in range(count)]
    bias = torch.randn(n, generator=generator)
    truth = torch.nn.functional.linear(x.double(), weights[0].double(), bias.double())
    native = activation_dtype if dtype != "int8" else torch.float32
    inputs = x.to(activation_dtype)
    passes: dict[str, Callable[[], object]] = {}
    agreement: dict[str, Agreement] = {}
    with torch.inference_mode():
        for name, provider in providers.items():
            layers = [provider(weight.to(native), bias.to(native), m) for weight in weights]
            agreement[name] = compare([layers[0](inputs)], [truth])
            passes[name] = lambda layers=layers: [layer(inputs) for layer in layers]  # type: ignore[misc]
        timings = interleaved(passes, rounds=rounds, seconds=seconds)
    per_layer = {
        name: Timing(tuple(tuple(t / count for t in calls) for calls in timing.rounds))
        for name, timing in timings.items()
    }
    return {name: (per_layer[name], agreement[name]) for name in providers}


def main(
    shapes: Annotated[
        list[str] | None, typer.Argument(metavar="MxKxN", help=f"[default: {' '.join(DEFAULT)}]")
    ] = None,
    dtypes: Annotated[str, typer.Option(help=f"Any of {', '.join(PROVIDERS)}.")] = ",".join(PROVIDERS),
    footprint: Annotated[int, typer.Option(min=1, help="Megabytes of float32 weights per pass.")] = 256,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    seconds: Annotated[float, typer.Option(min=0, help="Least length of a burst.")] = 0.2,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Table of microseconds, GFLOP/s and share of the peak, per shape, dtype and provider."""
    choice = apply_threads(threads)
    peaks = hardware.measure_peaks(choice.count)
    console = Console()
    console.print(f"{choice.count} threads; peaks: {peaks}")
    for text in shapes or DEFAULT:
        if re.fullmatch(r"\d+x\d+x\d+", text) is None:
            raise typer.BadParameter(f"shape {text!r} is not of the form MxKxN, e.g. {DEFAULT[0]}")
        m, k, n = (int(size) for size in text.split("x"))
        table = Table(title=f"{m} x {k} -> {n}", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        table.padding = (0, 1, 0, 0)
        for heading in ("dtype", "provider"):
            table.add_column(heading, no_wrap=True)
        for heading in ("us", "95 % interval", "GFLOP/s", "% of peak", "rel error"):
            table.add_column(heading, justify="right", no_wrap=True)
        for dtype in dtypes.split(","):
            results = measure((m, k, n), dtype, footprint=footprint << 20, rounds=rounds, seconds=seconds)
            for name, (timing, agreement) in results.items():
                rate = 2e-9 * m * k * n / timing.seconds.value
                table.add_row(
                    dtype,
                    name,
                    f"{timing.seconds.value * 1e6:.1f}",
                    f"{timing.seconds.low * 1e6:.0f}..{timing.seconds.high * 1e6:.0f}",
                    f"{rate:.0f}",
                    f"{100 * rate / getattr(peaks, dtype):.0f}",
                    f"{agreement.max_relative_error:.1e}",
                )
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
