"""Measure text generation side by side: one process per system, texts in turns, a probe of the memory around each text.

A machine's memory may read at another speed for minutes at a time, so each text has a limit of its own to be compared with.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import harness, launch
from benchmarks.driver import Worker, WorkerError
from benchmarks.generation import cases
from benchmarks.generation.systems import BASE
from benchmarks.quiet import exclusive, group_priority
from hf_cpu_accel import extension
from hf_cpu_accel.measure import Estimate, Timing, median_estimate, speedup
from hf_cpu_accel.measure.generation import Generated
from hf_cpu_accel.measure.generation_cost import peak_of
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.runtime.hardware import Peaks


@dataclass(frozen=True)
class Run:
    """One text, and the read bandwidth around it in bytes per second, None where no kernels measure it."""

    text: Generated
    bandwidth: float | None


@dataclass(frozen=True)
class Record:
    """One system with one model; `error` instead of numbers if it could not be measured.

    ready: the worker's facts. base_runs, base_ready: the same of eager bfloat16.
    """

    workload: str
    system: str
    prompt: int
    error: str | None = None
    runs: tuple[Run, ...] = ()
    base_runs: tuple[Run, ...] = ()
    ready: dict[str, Any] = field(default_factory=dict)
    base_ready: dict[str, Any] = field(default_factory=dict)
    probes: tuple[dict[str, float], ...] = ()

    @property
    def first(self) -> Timing:
        """Return the seconds to the first token, one per round."""
        return _timing(self.runs, "first")

    @property
    def step(self) -> Timing:
        """Return the mean seconds per token after the first, one per round."""
        return _timing(self.runs, "step")

    @property
    def first_speedup(self) -> Estimate:
        return speedup(_timing(self.base_runs, "first"), self.first)

    @property
    def step_speedup(self) -> Estimate:
        return speedup(_timing(self.base_runs, "step"), self.step)

    @property
    def read_share(self) -> Estimate | None:
        """Return the share of the bandwidth around each text that reading the system's weights took."""
        shares = [
            self.ready["step_bytes"] / run.text.step / run.bandwidth for run in self.runs if run.bandwidth
        ]
        return median_estimate(shares) if shares else None

    @property
    def flops_share(self) -> float | None:
        """Return the share of the arithmetic peak (the better of before and after) that the prompt's linear layers took."""
        if not self.probes:
            return None
        peak = max(peak_of(Peaks(**probe), self.ready["dtype"]) for probe in self.probes)  # type: ignore[arg-type]
        return self.base_ready["first_flops"] / self.first.seconds.value / (peak * 1e9)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values: seconds, bytes, bytes per second."""
        out: dict[str, object] = {"workload": self.workload, "system": self.system}
        if not self.runs:
            return {**out, "error": self.error}
        share = self.read_share
        return {
            **out,
            "prefill": self.prompt / self.first.seconds.value,
            "decode": 1 / self.step.seconds.value,
            "first": asdict(self.first.seconds),
            "step": asdict(self.step.seconds),
            "first_speedup": asdict(self.first_speedup),
            "step_speedup": asdict(self.step_speedup),
            "read_share": None if share is None else asdict(share),
            "flops_share": self.flops_share,
            **self.ready,
            "runs": [asdict(run) for run in self.runs],
            "probes": list(self.probes),
        }


def run(
    model: str,
    names: Sequence[str],
    *,
    prompt: int,
    new: int,
    rounds: int,
    threads: int | None = None,
    priority: bool = True,
    say: Callable[[str], None] = print,
) -> list[Record]:
    """Measure systems side by side on one model; the first record is the base, eager bfloat16.

    Raises WorkerError if the base cannot be measured; other systems that fail become records with an error.
    """
    workload = f"{cases.title(model)}:{prompt}+{new}"
    order = [BASE, *(name for name in names if name != BASE)]
    errors: dict[str, str] = {}
    ready: dict[str, dict[str, Any]] = {}
    workers: list[Worker] = []
    runs: dict[str, list[Run]] = {}
    try:
        for name in order:
            say(f"{workload}: preparing {name}")
            try:
                worker = launch.start_writer(model, name, prompt, new, threads)
                workers.append(worker)
                ready[name] = worker.wait_ready()
                runs[name] = []
            except WorkerError as error:
                if name == BASE:
                    raise
                errors[name] = str(error)
        able = [worker for worker in workers if worker.system in ready]
        say(f"{workload}: measuring")
        with exclusive(), group_priority(-20) if priority else contextlib.nullcontext():
            before = harness.probe(threads)
            for _ in range(rounds):
                for worker in able:
                    runs[worker.system].append(_text(worker, threads))
                able.reverse()
            probes = tuple(probe for probe in (before, harness.probe(threads)) if probe is not None)
    finally:
        for worker in workers:
            worker.close()
    return [
        Record(
            workload,
            name,
            prompt,
            errors.get(name),
            tuple(runs.get(name, ())),
            tuple(runs[BASE]),
            ready.get(name, {}),
            ready[BASE],
            probes,
        )
        for name in order
    ]


def _text(worker: Worker, threads: int | None) -> Run:
    before = _bandwidth(threads)
    text = worker.generate()
    after = _bandwidth(threads)
    return Run(text, None if before is None or after is None else statistics.mean((before, after)))


def _bandwidth(threads: int | None) -> float | None:
    return hardware.measure_read_bandwidth(threads) * 1e9 if extension.status().loaded else None


def _timing(runs: Sequence[Run], part: str) -> Timing:
    return Timing(tuple((getattr(one.text, part),) for one in runs))
