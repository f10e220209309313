"""Child processes of tests, limited by the CPU time that they take: the clock also counts what else the machine is doing."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from collections.abc import Sequence
from typing import Any

import psutil

LAST_RESORT = 1800.0  # seconds by the clock, against a child that waits forever and so takes no CPU time


def run_child(
    command: Sequence[str], *, cpu_seconds: int = 60, **options: Any
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with captured text; the kernel ends a process that takes more CPU time.

    Raises:
        subprocess.CalledProcessError: with `check=True`, if it fails or takes longer.
    """
    check, given = options.pop("check", False), options.pop("input", None)
    pipe = subprocess.PIPE
    stdin = None if given is None else pipe
    with subprocess.Popen(command, stdin=stdin, stdout=pipe, stderr=pipe, text=True, **options) as child:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            resource.prlimit(child.pid, resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        try:
            output, errors = child.communicate(given, timeout=LAST_RESORT)
        except BaseException:
            child.kill()
            raise
    done = subprocess.CompletedProcess(list(command), child.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def cpu_seconds() -> float:
    """What this process and all that it has started have taken so far."""
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(
                process.cpu_times()[:4]
            )  # user and system, its own and that of its children which have ended
    return total
