"""A server as a process of its own, for as long as it is measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

_END = 90.0  # seconds that a server has after SIGTERM; it gives requests 60


def command(*models: str, dtype: str, threads: int | None = None) -> list[str]:
    """`hf-cpu-accel serve` of these models, on a free port, by this Python."""
    start = "from hf_cpu_accel.cli.main import app; app()"
    chosen = [] if threads is None else ["--threads", str(threads)]
    return [sys.executable, "-c", start, "serve", *models, "--dtype", dtype, "--port", "0", *chosen]


@contextmanager
def server(command: Sequence[str]) -> Iterator[tuple[int, psutil.Process]]:
    """The port and the process of a server that this command starts, and which says its address on a line of its own.

    Raises:
        RuntimeError: it ended before it served.
        subprocess.TimeoutExpired: it did not end within 90 seconds of SIGTERM, and was killed.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = next((line.split(" ")[0] for line in child.stdout if line.startswith("http://")), None)
        try:
            if address is None:
                raise RuntimeError(f"{' '.join(command)} ended before it served")
            yield int(address.rsplit(":", 1)[1]), psutil.Process(child.pid)
        finally:
            child.terminate()
            try:
                child.wait(_END)
            finally:
                child.kill()  # nothing, if it has ended
