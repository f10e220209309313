"""The child process that compiles one block.

The job comes as its standard input, a file without a name that the parent has written: modules are sent as a pickle, which runs
whatever is in it, so there must be no path at which another user could put another. What came of it is left as `result.json` in a
folder that the parent has made for this child: {"state": "done", "text": folder of the artifact, "cpu_seconds": number}, or
"failed" and why.
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
    """A block, one call of it, the threads that the library is for, and where the artifact goes."""

    block: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    threads: int
    into: Path


def run(job: Job, folder: Path) -> Result:
    """Compile in this process; `folder` is for what lies around meanwhile."""
    from hf_cpu_accel.compiler import torch_private
    from hf_cpu_accel.compiler.background import artifacts
    from hf_cpu_accel.compiler.background.trace import NotCompiled, compile_block

    start = _cpu_seconds()
    made = folder / "artifact"
    made.mkdir()
    try:
        problem = torch_private.problem()
        if problem is not None:
            raise NotCompiled(problem)
        if not torch_private.has_compiler():
            raise NotCompiled("no C++ compiler found (install g++ or set CXX)")
        with _own_inductor_folder():
            compiled = compile_block(job.block, job.args, job.kwargs, made, threads=job.threads)
        return "done", str(artifacts.write(compiled, made, job.into)), _cpu_seconds() - start
    except NotCompiled as reason:
        return "failed", str(reason), _cpu_seconds() - start
    except Exception as error:  # Inductor's own
        first = next(iter(str(error).strip().splitlines()), "")
        return "failed", f"compilation failed: {type(error).__name__}: {first[:160]}", _cpu_seconds() - start


@contextmanager
def _own_inductor_folder() -> Iterator[None]:
    """Inside, Inductor reads nothing that another user can have written; by default its folder is one in /tmp."""
    from hf_cpu_accel.compiler import torch_private
    from hf_cpu_accel.runtime.home_folder import cache_folder
    from hf_cpu_accel.runtime.private_files import make_folder, problem

    folder = torch_private.inductor_folder()
    if problem(folder) is not None:
        folder = cache_folder("inductor")
    with torch_private.inductor_in(make_folder(folder)):
        yield


def _cpu_seconds() -> float:
    """Of this process and the compilers that it started."""
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
    """What the child that ran in `folder` has left there.

    Raises:
        ValueError: it is damaged.
    """
    try:
        found = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    match found:
        case {"state": "done" | "failed" as state, "text": str() as text, "cpu_seconds": float() as seconds}:
            if math.isfinite(seconds):
                return state, text, seconds
    raise ValueError(f"no result: {str(found)[:80]}")
