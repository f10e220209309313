"""Side-by-side measurement: one process per system, bursts in turns, one run at a time on the machine.

Workers prepare and warm up first. Then, under a lock that other runs of this harness wait for, the driver
asks them for bursts in turn, A B C, C B A, ...; all but one sleep meanwhile. Probes of the machine's
arithmetic and memory before and after show whether its speed stayed the same.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import launch, systems, workloads
from benchmarks.driver import Worker, WorkerError
from benchmarks.quiet import exclusive, group_priority
from hf_cpu_accel import extension
from hf_cpu_accel.measure import Agreement, Timing, compare, speedup
from hf_cpu_accel.runtime import hardware

_LONG_CALL = 2.0  # seconds; one of these is as steady as a burst of short calls


@dataclass(frozen=True)
class Record:
    """One system on one workload; `error` instead of numbers if it could not be measured."""

    workload: str
    system: str
    error: str | None = None
    timing: Timing | None = None
    base: Timing | None = None
    agreement: Agreement | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    probes: tuple[dict[str, float], ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values: seconds, bytes, GFLOP/s, GB/s."""
        out: dict[str, object] = {"workload": self.workload, "system": self.system}
        if self.timing is None or self.base is None or self.agreement is None:
            return {**out, "error": self.error}
        return {
            **out,
            "seconds": asdict(self.timing.seconds),
            "best_seconds": self.timing.best,
            "speedup": asdict(speedup(self.base, self.timing)),
            "worst_cosine": self.agreement.worst_cosine,
            "max_relative_error": self.agreement.max_relative_error,
            **self.ready,
            "probes": list(self.probes),
        }


def run(
    workload: str,
    names: Sequence[str],
    *,
    rounds: int,
    calls: int,
    seconds: float,
    threads: int | None = None,
    priority: bool = True,
    say: Callable[[str], None] = print,
) -> list[Record]:
    """Measure systems side by side on one workload; the first record is the base, eager float32.

    Raises WorkerError if the base cannot be measured; other systems that fail become records with an error.
    """
    order = [systems.BASE, *(name for name in names if name != systems.BASE)]
    records: dict[str, Record] = {}
    workers: list[Worker] = []
    ready: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="hf_cpu_accel_bench_") as scratch:
        folder = Path(scratch)
        try:
            for name in order:
                say(f"{workload}: preparing {name}")
                try:
                    worker, ready[name] = _prepared(workload, name, threads)
                    workers.append(worker)
                except WorkerError as error:
                    if name == systems.BASE:
                        raise
                    records[name] = Record(workload, name, error=str(error))
            real_tokens = workloads.parse(workload).real_tokens
            outputs = {worker.system: real_tokens(worker.output(folder)) for worker in workers}
            say(f"{workload}: measuring")
            with exclusive(), group_priority(-20) if priority else contextlib.nullcontext():
                before = probe(threads)
                _bursts(workers, rounds, calls, seconds)
                probes = tuple(p for p in (before, probe(threads)) if p is not None)
        finally:
            for worker in workers:
                worker.close()
    base = Timing(tuple(workers[0].bursts))
    for worker in workers:
        records[worker.system] = Record(
            workload,
            worker.system,
            timing=Timing(tuple(worker.bursts)),
            base=base,
            agreement=compare(outputs[worker.system], outputs[systems.BASE]),
            ready=ready[worker.system],
            probes=probes,
        )
    return [records[name] for name in order]


def _prepared(workload: str, system: str, threads: int | None) -> tuple[Worker, dict[str, Any]]:
    worker = launch.start(workload, system, threads)
    try:
        return worker, worker.wait_ready()
    except BaseException:
        worker.close()
        raise


def _bursts(workers: list[Worker], rounds: int, calls: int, seconds: float) -> None:
    turns = list(workers)
    # The warm-up is not recorded, but determines which systems get one call per burst.
    enough = {worker.system: 1 if worker.burst(1, 0.0)[0] > _LONG_CALL else calls for worker in turns}
    for _ in range(rounds):
        for worker in turns:
            worker.bursts.append(worker.burst(enough[worker.system], seconds))
        turns.reverse()


def probe(threads: int | None) -> dict[str, float] | None:
    """Measure the machine's limits; return None without the native kernels that measure them."""
    return asdict(hardware.measure_peaks(threads)) if extension.status().loaded else None
