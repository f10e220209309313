"""`hf-cpu-accel launch`: a script in one or more processes, each pinned to cores of its own, with an environment for inference."""

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
    """What is to be started: a command, and where and with which variables each instance of it runs."""

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
    """Decide everything; starts nothing.

    Args:
        command: arguments of Python: a script or `-m` and a module, and what they are given.
        instances, threads: see `placement.place`.
        allocator: one of `environment.ALLOCATORS`.
        pin: whether each instance has cores of its own.

    Raises:
        TypeError, ValueError: an argument that is not accepted.
    """
    found = placement.place(placement.limits(), instances, threads)
    rows = [Setting("instances", str(len(found.places)), found.reason)]
    environments = []
    shared: list[Setting] = []
    for number, place in enumerate(found.places):
        where = str(place) if pin else f"{place.threads} threads, not pinned"
        rows.append(Setting(f"instance {number}", where, _why(place, pin)))
        own, shared = variables(place.threads, os.environ, allocator)
        environments.append({**own, INSTANCE: str(number), INSTANCES: str(len(found.places))})
    shared.append(
        Setting(
            INSTANCE,
            f"0 to {len(found.places) - 1}",
            f"which of them a process is; {INSTANCES} says of how many",
        )
    )
    return Launch(
        (sys.executable, *command), found.places if pin else (), tuple(environments), (*rows, *shared)
    )


def run(launch: Launch) -> int:
    """Start all, hand signals on, and wait for all.

    Returns:
        0 if all ended well, else the status of the first in their order that did not; 128 + the signal if one ended it.
    """
    processes: list[subprocess.Popen[Any]] = []
    with _handed_on(processes):
        for number, own in enumerate(launch.environments):
            with _pinned(launch.places[number] if launch.places else None):
                processes.append(subprocess.Popen(launch.command, env={**os.environ, **own}))
        statuses = [_wait(process) for process in processes]
    return next((128 - status if status < 0 else status for status in statuses if status), 0)


def _why(place: Place, pin: bool) -> str:
    if not pin:
        return "--no-pin"
    return (
        "memory comes from the node of its cores" if place.node is not None else "no memory node of its own"
    )


def _wait(process: subprocess.Popen[Any]) -> int:
    """Ctrl-C reaches the instances by the terminal: what they make of it is waited for."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


@contextlib.contextmanager
def _pinned(place: Place | None) -> Iterator[None]:
    """Inside, processes start on the CPUs of `place`."""
    before = os.sched_getaffinity(0)
    if place is not None:
        os.sched_setaffinity(0, place.cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _handed_on(processes: list[subprocess.Popen[Any]]) -> Iterator[None]:
    """Inside, what asks this process to end is asked of `processes`."""

    def hand_on(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
