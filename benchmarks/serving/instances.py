"""Compare instances with threads on two cores: requests of one text to MiniLM with its trained weights.

python -m benchmarks.serving.instances [--dtype int8] [--tokens 32] [--quota]

"one" is one instance with all cores as its threads, "threads" and "processes" are pools with an instance for each core. With
--quota (root, and control groups that can be written) the pool that chooses by itself is compared with settings by hand under
a quota of one CPU. Systems take turns; ratios are those inside one round.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import quiet
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.cli.demo_measure import load_minilm
from hf_cpu_accel.cli.tables import colored_ratio, results_table, wide_console
from hf_cpu_accel.measure import environment
from hf_cpu_accel.measure.timing import Timing, speedup
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.serve.instances import InstancePool

_GROUPS = Path("/sys/fs/cgroup")


def main(
    dtype: Annotated[str, typer.Option(help="Dtype of accelerate_for_cpu.")] = "int8",
    tokens: Annotated[int, typer.Option(help="Tokens of each request.")] = 32,
    requests: Annotated[int, typer.Option(help="Requests of each system in each round.")] = 200,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 8,
    quota: Annotated[bool, typer.Option("--quota", help="Measure under a quota of one CPU.")] = False,
) -> None:
    """Measure, and print a table."""
    encoder = load_minilm()
    model = next(module for module in encoder.modules() if type(module).__name__ == "BertModel")
    accelerate_for_cpu(model, dtype=dtype)
    items = [_request(tokens, number) for number in range(requests)]
    cores = hardware.detect().affinity_cores
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet.exclusive())
        stack.enter_context(quiet.group_priority(-19))
        if quota:
            stack.enter_context(one_cpu())
        systems = _under_quota(model) if quota else _systems(model, cores)
        timings = {name: [] for name in systems}
        for number in range(rounds):
            for name in list(systems)[:: 1 if number % 2 else -1]:
                timings[name].append((_seconds(systems[name], items) / requests,))
    _show({name: Timing(tuple(taken)) for name, taken in timings.items()}, f"MiniLM 1x{tokens}, {dtype}")


def _systems(model: Any, cores: int) -> dict[str, Callable[[], InstancePool]]:
    return {
        f"one x {cores} threads": lambda: InstancePool(model, 1, cores, kind="thread"),
        f"{cores} threads x 1": lambda: InstancePool(model, cores, 1, kind="thread"),
        f"{cores} processes x 1": lambda: InstancePool(model, cores, 1, kind="process"),
    }


def _under_quota(model: Any) -> dict[str, Callable[[], InstancePool]]:
    by_hand = {
        f"by hand: {instances} x {threads}": lambda instances=instances, threads=threads: InstancePool(
            model, instances, threads, kind="thread", pin=False
        )
        for instances, threads in ((1, 1), (1, 2), (2, 1))
    }
    return {
        **by_hand,
        "the pool's choice": lambda: InstancePool(model, kind="thread"),
        "the pool, 2 asked for": lambda: InstancePool(model, 2, kind="thread"),
    }


def _seconds(system: Callable[[], InstancePool], items: list[dict[str, torch.Tensor]]) -> float:
    """Return the seconds of all items, after a warm-up."""
    with system() as pool:
        for _ in pool.map(items[:20]):
            pass
        start = time.perf_counter()
        for _ in pool.map(items):
            pass
        return time.perf_counter() - start


def _request(tokens: int, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1000, 30000, (1, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextlib.contextmanager
def one_cpu() -> Iterator[None]:
    """Move this process into a control group with a quota of one CPU.

    Raises:
        OSError: No control group can be written.
    """
    second = (_GROUPS / "cgroup.controllers").exists()
    line = next(
        re.finditer(
            r"^0::(.*)$" if second else r"^\d+:cpu(?:,\w+)*:(.*)$",
            Path("/proc/self/cgroup").read_text(),
            re.M,
        )
    )
    parent = (_GROUPS if second else _GROUPS / "cpu") / line.group(1).lstrip("/")
    group = parent / f"hf-cpu-accel-{os.getpid()}"
    group.mkdir()
    try:
        if second:
            (group / "cpu.max").write_text("100000 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text("100000")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
        (parent / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        group.rmdir()


def _show(timings: dict[str, Timing], title: str) -> None:
    first = next(iter(timings))
    table = results_table(("system", "requests\nper s", f"of\n{first}"), title)
    for name, timing in timings.items():
        ratio = speedup(timings[first], timing)
        table.add_row(
            name,
            f"{1 / timing.seconds.value:.0f}",
            f"{colored_ratio(ratio.value)} {ratio.low:.2f}..{ratio.high:.2f}",
        )
    console = wide_console()
    console.print(table)
    console.print(environment.summary(environment.environment(), torch.get_num_threads()), style="dim")


if __name__ == "__main__":
    typer.run(main)
