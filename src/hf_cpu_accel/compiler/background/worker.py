"""The child process that compiles one block.

The child reads the job, a pickle, from its standard input: an unnamed file that the parent wrote. Unpickling runs code, so the job
has no path where another user could put another pickle. The child writes `result.json` into a folder that the parent created:
{"state": "done", "text": folder of the artifact, "cpu_seconds": number}, or "failed" with the reason as text.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RESULT = "result.json"
Result = tuple[str, str, float]


@dataclass(frozen=True)
class Job:
    """A block, one call of it, the number of threads of the library, and the folder for the artifact."""

    block: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    threads: int
    into: Path


def run(job: Job, folder: Path) -> Result:
    """Compile in this process, with temporary files in `folder`."""
    from hf_cpu_accel.compiler import torch_private
    from hf_cpu_accel.compiler.background import artifacts
    from hf_cpu_accel.compiler.background.trace import NotCompiled, compile_block

    start = _cpu_seconds()
    artifact = folder / "artifact"
    artifact.mkdir()
    try:
        problem = torch_private.problem()
        if problem is not None:
            raise NotCompiled(problem)
        if not torch_private.has_compiler():
            raise NotCompiled("no C++ compiler found (install g++ or set CXX)")
        with _private_inductor_folder():
            compiled = compile_block(job.block, job.args, job.kwargs, artifact, threads=job.threads)
        return "done", str(artifacts.write(compiled, artifact, job.into)), _cpu_seconds() - start
    except NotCompiled as reason:
        return "failed", str(reason), _cpu_seconds() - start
    except Exception as error:  # any error of Inductor
        first = next(iter(str(error).strip().splitlines()), "")
        return "failed", f"compilation failed: {type(error).__name__}: {first[:160]}", _cpu_seconds() - start


@contextmanager
def _private_inductor_folder() -> Iterator[None]:
    """Inside, Inductor uses a folder that only this user can write to; its default folder is in /tmp."""
    from hf_cpu_accel.compiler import torch_private
    from hf_cpu_accel.runtime.home_folder import cache_folder
    from hf_cpu_accel.runtime.private_files import make_folder, problem

    folder = torch_private.inductor_folder()
    if problem(folder) is not None:
        folder = cache_folder("inductor")
    with torch_private.inductor_in(make_folder(folder)):
        yield


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of the compilers that it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main(folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    job = torch.load(sys.stdin.buffer, weights_only=False)
    state, text, _ = run(job, folder)
    partial = folder / f"{_RESULT}.new"
    partial.write_text(json.dumps({"state": state, "text": text, "cpu_seconds": _cpu_seconds()}))
    partial.rename(folder / _RESULT)


def result(folder: Path) -> Result | None:
    """Return the result that the child wrote into `folder`, or None if there is none.

    Raises:
        ValueError: the result is damaged.
    """
    try:
        fields = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    match fields:
        case {"state": "done" | "failed" as state, "text": str() as text, "cpu_seconds": float() as seconds}:
            if math.isfinite(seconds):
                return state, text, seconds
    raise ValueError(f"no result: {str(fields)[:80]}")
