"""The driver's end of a worker process; protocol.py describes their messages."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_cpu_accel.measure.generation import Generated

_ROOT = Path(__file__).resolve().parent.parent
_PREPARE_SECONDS = 1500.0  # torch.compile or static quantization of a large model on a busy machine
_ANSWER_SECONDS = 300.0


class WorkerError(RuntimeError):
    """A system that could not be prepared or that died, with its own message."""


class Worker:
    """A process that speaks the protocol. Standard error goes to `log`."""

    def __init__(self, system: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.system = system
        self.log = log
        self.bursts: list[tuple[float, ...]] = []
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def wait_ready(self) -> dict[str, Any]:
        """Return the facts of the worker's preparation. Raises WorkerError."""
        ready: dict[str, Any] = self._answer(_PREPARE_SECONDS)["ready"]
        return ready

    def burst(self, calls: int, seconds: float) -> tuple[float, ...]:
        """Return the seconds of each call; see `hf_cpu_accel.measure.burst`."""
        return tuple(self._ask(do="burst", calls=calls, seconds=seconds)["times"])

    def generate(self) -> Generated:
        """Return the times of one generated text."""
        answer = self._ask(do="generate")
        return Generated(answer["first"], tuple(answer["steps"]))

    def output(self, folder: Path) -> list[torch.Tensor]:
        """Return the float32 outputs of the first call."""
        path = folder / f"{self.system}.npz"
        self._ask(do="output", path=str(path))
        with np.load(path) as arrays:
            return [torch.from_numpy(array) for array in arrays.values()]

    def close(self) -> None:
        """Ask the process to quit, and kill it if it does not."""
        if self._process.poll() is None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write('{"do": "quit"}\n')
                self._process.stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _ask(self, **request: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"{self.system} died; see {self.log}") from None
        return self._answer(_ANSWER_SECONDS)

    def _answer(self, timeout: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        # One line per request, so nothing is ever left in the buffer that select cannot see.
        if not select.select([stdout], [], [], timeout)[0]:
            self._process.kill()
            raise WorkerError(f"{self.system} did not respond within {timeout:.0f} s; see {self.log}")
        line = stdout.readline()
        if not line:
            raise WorkerError(f"{self.system} died; see {self.log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.system}: {answer['error']}")
        return answer
