"""Protect a measurement: one run at a time, with priority over other processes where permitted."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from hf_cpu_accel.runtime.home_folder import home_folder
from hf_cpu_accel.runtime.private_files import make_folder


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Wait until no other run of this harness, of this user, is measuring."""
    path = home_folder() / "bench" / "lock"
    make_folder(path.parent)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def group_priority(nice: int) -> Iterator[bool]:
    """Raise the weight of this login session against others; yields whether the kernel permitted it.

    With the scheduler's autogroups `nice` counts only inside a session, so a build in another session takes
    half of the machine at any nice value. Without the right to raise priorities nothing happens.
    """
    path = Path("/proc/self/autogroup")
    try:
        before = path.read_text().rsplit("nice", 1)[1].strip()
        path.write_text(str(nice))
    except (OSError, IndexError):
        yield False
        return
    try:
        yield True
    finally:
        path.write_text(before)
