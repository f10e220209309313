"""`hf-cpu-accel launch`: run a script in one or more processes, each pinned to its own cores, with an environment for inference."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hf_cpu_accel.serve.instances import placement
from hf_cpu_accel.serve.instances.environment import variables
from hf_cpu_accel.serve.instances.placement import Place
from hf_cpu_accel.serve.instances.settings import Setting

INSTANCE, INSTANCES = "HF_CPU_ACCEL_INSTANCE", "HF_CPU_ACCEL_INSTANCES"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Launch:
    """A command, and the cores and environment variables of each of its instances.

    Attributes:
        command: program and arguments.
        places: the cores of each instance; empty without pinning.
        environments: the variables to add for each instance.
        settings: the rows of the table.
    """

    command: tuple[str, ...]
    places: tuple[Place, ...]
    environments: tuple[dict[str, str], ...]
    settings: tuple[Setting, ...]


def plan(
    command: Sequence[str],
    instances: int = 1,
    threads: int | None = None,
    allocator: str = "auto",
    *,
    pin: bool = True,
) -> Launch:
    """Choose cores and environment variables; nothing is started.

    Args:
        command: arguments for Python: a script, or `-m` and a module, with its arguments.
        instances: see `placement.place`.
        threads: see `placement.place`.
        allocator: one of `environment.ALLOCATORS`.
        pin: pin each instance to its own cores.

    Raises:
        TypeError, ValueError: an argument that is not accepted.
    """
    result = placement.place(placement.limits(), instances, threads)
    places = result.places
    rows = [Setting("instances", str(len(places)), result.reason)]
    environments = []
    common: list[Setting] = []
    for number, place in enumerate(places):
        where = str(place) if pin else f"{place.threads} threads, not pinned"
        rows.append(Setting(f"instance {number}", where, _why(place, pin)))
        added, common = variables(place.threads, os.environ, allocator)
        environments.append({**added, INSTANCE: str(number), INSTANCES: str(len(places))})
    common.append(
        Setting(
            INSTANCE,
            f"0 to {len(places) - 1}",
            f"number of the instance; {INSTANCES} is the number of all instances",
        )
    )
    return Launch((sys.executable, *command), places if pin else (), tuple(environments), (*rows, *common))


def run(launch: Launch) -> int:
    """Start all instances, forward signals, and wait for their ends.

    Returns:
        0 if all instances succeeded, or else the exit status of the first that failed; 128 + the signal if a signal ended it.
    """
    processes: list[subprocess.Popen[Any]] = []
    with _forward_signals(processes):
        for number, environment in enumerate(launch.environments):
            with _pin(launch.places[number] if launch.places else None):
                processes.append(subprocess.Popen(launch.command, env={**os.environ, **environment}))
        statuses = [_wait(process) for process in processes]
    return next((128 - status if status < 0 else status for status in statuses if status), 0)


def _why(place: Place, pin: bool) -> str:
    if not pin:
        return "--no-pin"
    return (
        "memory comes from the NUMA node of its cores" if place.node is not None else "not on one NUMA node"
    )


def _wait(process: subprocess.Popen[Any]) -> int:
    """Wait for a process, also after Ctrl-C, which the terminal sends to the instances too."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


@contextlib.contextmanager
def _pin(place: Place | None) -> Iterator[None]:
    """Start processes inside the context on the CPUs of `place`."""
    before = os.sched_getaffinity(0)
    if place is not None:
        os.sched_setaffinity(0, place.cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _forward_signals(processes: list[subprocess.Popen[Any]]) -> Iterator[None]:
    """Forward SIGTERM and SIGHUP to `processes` inside the context."""

    def forward(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
