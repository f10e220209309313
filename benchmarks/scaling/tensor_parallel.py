"""Compare text generation by two ranks (gloo, a thread each) with one process of one and of two threads, over the same weights.

python -m benchmarks.scaling.tensor_parallel [--model Qwen2.5-0.5B] [--dtype int8] [--record]

The model is built with random weights, and written to a temporary folder. Systems take turns in separate processes; the best
round of each number counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks import quiet
from benchmarks.scaling.measured import record as keep
from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.cli.random_models import build
from hf_cpu_accel.cli.tables import results_table, wide_console
from hf_cpu_accel.runtime.exchange import Exchange

PROMPT, NEW = 128, 32
_REDUCTIONS = 200
# Ranks and threads of each.
SYSTEMS = {
    "one process, 1 thread": (1, 1),
    "one process, 2 threads": (1, 2),
    "two ranks, 1 thread each": (2, 1),
}


def main(
    model: Annotated[
        str, typer.Option(help="A name of `hf-cpu-accel bench --random-config`.")
    ] = "Qwen2.5-0.5B",
    dtype: Annotated[str, typer.Option(help="Dtype of accelerate_for_cpu.")] = "int8",
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 3,
    record: Annotated[bool, typer.Option("--record", help="Record the numbers for the cost model.")] = False,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure, and print a table."""
    if child:
        _measure(Path(child), dtype)
        return
    with tempfile.TemporaryDirectory() as folder, quiet.exclusive():
        build(model).to(torch.bfloat16).save_pretrained(folder)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
        for _ in range(rounds):
            for name, (ranks, threads) in SYSTEMS.items():
                found[name].append(_run(folder, dtype, ranks, threads))
    best = {
        name: {key: min(each[key] for each in taken) for key in taken[0]} for name, taken in found.items()
    }
    table = results_table(["", "tokens/s", "ms per token", f"ms for {PROMPT} tokens", "MB of weights"])
    for name, values in best.items():
        row = (1e3 / values["token_ms"], values["token_ms"], values["prompt_ms"], values["weights_mb"])
        table.add_row(name, *(f"{value:.1f}" for value in row))
    console = wide_console()
    console.print(table)
    two = best["two ranks, 1 thread each"]
    console.print(
        f"a sum of one token's hidden states over two ranks: {two['exchange_us']:.0f} us through shared memory, "
        f"{two['gloo_us']:.0f} us by gloo"
    )
    if record:
        one, threads = best["one process, 1 thread"], best["one process, 2 threads"]
        keep(
            "tensor parallel",
            {
                "one_token_ms": one["token_ms"],
                "threads_token_ms": threads["token_ms"],
                "one_mb": one["weights_mb"],
                **two,
            },
        )


def _run(folder: str, dtype: str, ranks: int, threads: int) -> dict[str, float]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    start = [*launch, "-m"] if ranks > 1 else [sys.executable, "-m"]
    command = [*start, "benchmarks.scaling.tensor_parallel", "--child", folder, "--dtype", dtype]
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    found: dict[str, float] = json.loads(line)
    return found


def _measure(folder: Path, dtype: str) -> None:
    """Measure in this process; the first rank prints a line of JSON."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=ranks)} if ranks > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()
    accelerate_for_cpu(model, dtype=dtype, originals="drop")
    ids = torch.arange(PROMPT)[None] + 100
    _seconds(model, ids, 4)
    prompt = min(_seconds(model, ids, 1) for _ in range(3))
    whole = min(_seconds(model, ids, NEW + 1) for _ in range(3))
    hidden = model.config.hidden_size
    values = {
        "token_ms": (whole - prompt) / NEW * 1e3,
        "prompt_ms": prompt * 1e3,
        "weights_mb": sum(item.packed_bytes for item in explain(model).replaced) / 1e6,
        "gloo_us": _each(dist.all_reduce, hidden) * 1e6 if ranks > 1 else 0.0,
        "exchange_us": _each(Exchange().sum, hidden) * 1e6 if ranks > 1 else 0.0,
        "layers": model.config.num_hidden_layers,
        "hidden": hidden,
    }
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(values), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def _seconds(model: Any, ids: torch.Tensor, new: int) -> float:
    start = time.perf_counter()
    with torch.no_grad():
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    return time.perf_counter() - start


def _each(reduce: Callable[[torch.Tensor], object], numbers: int) -> float:
    values = torch.zeros(numbers)
    for _ in range(_REDUCTIONS // 10):
        reduce(values)
    start = time.perf_counter()
    for _ in range(_REDUCTIONS):
        reduce(values)
    return (time.perf_counter() - start) / _REDUCTIONS


if __name__ == "__main__":
    typer.run(main)
