"""Run a function on many names in child processes. A crash, or too much memory or time, ends one name; another child continues.

    python -m tests.shards FILE MODULE:FUNCTION NAMES ARGUMENTS      (both are lists in JSON)

A line {"started": name} comes before the line of a result. By it the parent knows at which name a process ended.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

from tqdm import tqdm

from tests.children import run_child

SECONDS = 100  # of CPU time for one name
ROOT = Path(__file__).parents[1]
_BATCH = 40
_MEMORY = 8 << 30
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

Line = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A function to call for each name, in processes.

    Attributes:
        function: `module:function`. It is called with a name and `arguments`. All of these and its result are JSON types.
        file: a file of JSON lines, {"name", "result"} or {"name", "error"} for each name. Lines are appended.
        arguments: more arguments of the function.
        environment: variables for the processes.
    """

    function: str
    file: Path
    arguments: Sequence[Any] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def lines(self) -> dict[str, Line]:
        """Return {name: its last line}, without a line that a crash has cut short."""
        lines: dict[str, Line] = {}
        for text in self.file.read_text().splitlines() if self.file.exists() else []:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if "name" in line:
                lines[line["name"]] = line
        return lines

    def run(self, names: Iterable[str], shards: int = 2) -> None:
        """Call the function for each name in `shards` processes at a time, and show a progress bar.

        Raises:
            RuntimeError: a process fails before its first name.
        """
        todo = list(names)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        waiting: SimpleQueue[list[str]] = SimpleQueue()
        size = max(1, min(_BATCH, -(-len(todo) // shards)))
        for first in range(0, len(todo), size):
            waiting.put(todo[first : first + size])
        with tqdm(total=len(todo), disable=None) as bar, ThreadPoolExecutor(shards) as pool:
            for shard in [pool.submit(self._shard, waiting, number, bar.update) for number in range(shards)]:
                shard.result()

    def _shard(self, waiting: SimpleQueue[list[str]], number: int, update: Callable[[int], Any]) -> None:
        part = self.file.with_suffix(f".{number}.part")
        while True:
            try:
                batch = waiting.get_nowait()
            except Empty:
                return
            while batch:
                rest = self.run_batch(batch, part)
                update(len(batch) - len(rest))
                batch = rest

    def run_batch(self, batch: list[str], part: Path) -> list[str]:
        """Run one process on `batch`, which writes to `part`, and return the names that it has not reached."""
        part.unlink(missing_ok=True)
        texts = json.dumps(batch), json.dumps(list(self.arguments))
        command = [sys.executable, "-m", "tests.shards", str(part), self.function, *texts]
        environment = {**os.environ, **_ENVIRONMENT, **self.environment}
        done = run_child(command, cpu_seconds=(SECONDS + 5) * len(batch), cwd=ROOT, env=environment)
        lines = [json.loads(text) for text in part.read_text().splitlines()] if part.exists() else []
        part.unlink(missing_ok=True)
        started = [line["started"] for line in lines if "started" in line]
        ended = [line for line in lines if "name" in line]
        if done.returncode and not started:  # not the fault of a name: no other process would get further
            raise RuntimeError(f"the child process fails: {done.stderr[-2000:]}")
        if done.returncode and started[-1] not in {line["name"] for line in ended}:
            error = f"the process ended with {done.returncode}: {done.stderr[-300:].strip()}"
            ended.append({"name": started[-1], "error": error})
        with self.file.open("a") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in ended)
        names = {line["name"] for line in ended}
        return [name for name in batch if name not in names]


def main(file: str, function: str, names: str, arguments: str) -> None:
    """Call the function for each name, in a child process."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    module, _, attribute = function.partition(":")
    call = getattr(importlib.import_module(module), attribute)
    signal.signal(signal.SIGPROF, _too_long)
    with open(file, "a") as lines:
        for name in json.loads(names):
            _write(lines, {"started": name})
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                line = {"name": name, "result": call(name, *json.loads(arguments))}
            except Exception as error:
                line = {"name": name, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(lines, line)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds of CPU time")


def _write(lines: TextIO, value: Line) -> None:
    lines.write(json.dumps(value, default=str) + "\n")
    lines.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
