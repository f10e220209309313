"""torch's intra-op thread count: the CPUs of this process, unless the user has set it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_cpu_accel.runtime import hardware

# Both bind torch's pool at start; OMP_NUM_THREADS is the one that torch's documentation names.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class ThreadChoice:
    """The number of threads, the reason, and its source: "argument", "environment", "user" or "hardware"."""

    count: int
    reason: str
    source: str


_applied: ThreadChoice | None = None


def apply_threads(n: int | None = None) -> ThreadChoice:
    """Set torch's intra-op threads to the limit of the hardware, and return the choice.

    The count is min(affinity, ceil(cgroup quota), physical cores), see ``hardware.thread_limit``. These have precedence, in this
    order:

    - ``n``;
    - ``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS`` in the environment;
    - an earlier ``torch.set_num_threads`` with another count than torch's default. (Pass a count that equals the default as ``n``.)

    Once set, it stays until it is changed. As always in torch, the count applies to the calling thread and to threads that have not
    computed yet.

    Args:
        n: the number of threads, or None.

    Raises:
        TypeError: ``n`` is not an integer.
        ValueError: ``n`` is below 1.
    """
    global _applied
    cpu = hardware.detect()
    current = torch.get_num_threads()
    if n is not None:
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"threads={n!r}: expected an integer, or None for {cpu.threads}")
        if n < 1:
            raise ValueError(f"threads={n}: expected at least 1, or None for {cpu.threads}")
        beyond = f", although only {cpu.threads} can run at a time" if n > cpu.threads else ""
        choice = ThreadChoice(n, f"{n} as set by threads={n}{beyond}", "argument")
    elif _applied is not None and current == _applied.count:
        return _applied
    else:
        choice = choose(current, cpu, os.environ, untouched=_applied is None)
    if choice.count != current:
        torch.set_num_threads(choice.count)
    _applied = choice
    return choice


def choose(
    current: int, cpu: hardware.CPUInfo, environ: Mapping[str, str], *, untouched: bool = True
) -> ThreadChoice:
    """Choose between the user's count and the hardware's, without setting it.

    Args:
        current: torch's present count.
        cpu: the machine.
        environ: the environment variables.
        untouched: whether this package has not set the count before; otherwise any difference is from the user.
    """
    named = next((name for name in _THREAD_VARIABLES if environ.get(name)), None)
    without_effect = ""
    if named is not None:
        outermost = environ[named].split(",")[0].strip()  # a list has one count per level of nesting
        if outermost == str(current):
            return ThreadChoice(current, f"{current} as set by {named}={environ[named]}", "environment")
        without_effect = (
            f" ({named}={environ[named]} has no effect: it was set after torch started, or overridden)"
        )
    defaults = {cpu.logical_cores, cpu.physical_cores, len(cpu.affinity), cpu.affinity_cores}
    if not untouched or current not in defaults:
        reason = f"{current} as set by an earlier torch.set_num_threads({current}){without_effect}"
        return ThreadChoice(current, reason, "user")
    return ThreadChoice(cpu.threads, cpu.thread_reason + without_effect, "hardware")
