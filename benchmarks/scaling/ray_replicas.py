"""Compare requests/s of one and of two replicas of integrations/ray/serving.py: MiniLM, texts of about 30 tokens.

python -m benchmarks.scaling.ray_replicas [--clients 8] [--record]

Ray lies in build/test-ray after `make test-ray`; that folder and integrations/ray have to be on PYTHONPATH.
"""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import ray
import typer
from ray import serve
from replica import Arguments
from serving import build

from benchmarks import quiet
from benchmarks.scaling.measured import record as keep
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.cli.demo_measure import load_minilm
from hf_cpu_accel.cli.tables import results_table, wide_console

PORT = 18433
TEXT = "A clerk at the town's small library found the missing book behind a shelf, years after it had been borrowed. "


def main(
    clients: Annotated[int, typer.Option(help="Concurrent requests.")] = 8,
    requests: Annotated[int, typer.Option(help="Requests in each round.")] = 1000,
    rounds: Annotated[int, typer.Option(help="Rounds; the best one counts.")] = 3,
    record: Annotated[bool, typer.Option("--record", help="Record the numbers for the cost model.")] = False,
) -> None:
    """Measure, and print a table."""
    found: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as models, quiet.exclusive():
        encoder = accelerate_for_cpu(load_minilm(), dtype="int8")
        encoder.save_pretrained(models, packed=True)
        ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        try:
            for replicas in (1, 2):
                arguments = Arguments(models=[models], min_replicas=replicas, max_replicas=replicas)
                serve.run(build(arguments))
                _per_second(clients, 100)
                found[replicas] = max(_per_second(clients, requests) for _ in range(rounds))
        finally:
            serve.shutdown()
            ray.shutdown()
    table = results_table(["replicas, 1 thread each", "requests/s"])
    for replicas, rate in found.items():
        table.add_row(str(replicas), f"{rate:.0f}")
    wide_console().print(table)
    if record:
        keep("ray replicas", {"one_per_s": found[1], "two_per_s": found[2]})


def _per_second(clients: int, requests: int) -> float:
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(_ask, range(requests)))
    return requests / (time.perf_counter() - start)


def _ask(number: int) -> None:
    body = json.dumps({"inputs": f"{TEXT}{number}"}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/embed", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


if __name__ == "__main__":
    typer.run(main)
