"""Run a server in a separate process during a measurement."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import psutil

import hf_cpu_accel

_START, _END = 300.0, 90.0  # seconds until it serves, and after SIGTERM; it gives requests 60


def command(*models: str, dtype: str, threads: int | None = None) -> list[str]:
    """Return the command of `hf-cpu-accel serve` for these models, on a free port, with this Python."""
    start = "from hf_cpu_accel.cli.main import app; app()"
    chosen = [] if threads is None else ["--threads", str(threads)]
    return [sys.executable, "-c", start, "serve", *models, "--dtype", dtype, "--port", "0", *chosen]


@contextmanager
def server(command: Sequence[str], port: int | None = None) -> Iterator[tuple[int, psutil.Process]]:
    """Start a server; yield its port and its process.

    Args:
        command: of any Python; this package is on its path.
        port: The port that it will listen on; without it the server prints its address on a line.

    Raises:
        RuntimeError: it ended before it was ready.
        subprocess.TimeoutExpired: it did not end within 90 seconds of SIGTERM, and was killed.
    """
    path = [str(Path(hf_cpu_accel.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    output = subprocess.PIPE if port is None else subprocess.DEVNULL
    with subprocess.Popen(command, stdout=output, text=True, env=environment) as child:
        try:
            found = _said(child) if port is None else _answering(child, port)
            if found is None:
                raise RuntimeError(f"{' '.join(command)} ended before it was ready")
            yield found, psutil.Process(child.pid)
        finally:
            child.terminate()
            try:
                child.wait(_END)
            finally:
                child.kill()  # nothing, if it has ended


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _said(child: subprocess.Popen[str]) -> int | None:
    assert child.stdout is not None
    address = next((line.split(" ")[0] for line in child.stdout if line.startswith("http://")), None)
    return None if address is None else int(address.rsplit(":", 1)[1])


def _answering(child: subprocess.Popen[str], port: int) -> int | None:
    end = time.monotonic() + _START
    while child.poll() is None and time.monotonic() < end:
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return port
        except OSError:
            time.sleep(0.2)
    return None
