"""The child process that compiles one block: `python -m hf_cpu_accel.compiler.background.worker FOLDER`.

It finds `job.pt` in the folder and leaves `result.pickle` there: ("done", folder of the artefact, CPU seconds) or ("failed", why,
CPU seconds).
"""

from __future__ import annotations

import pickle
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOB, RESULT = "job.pt", "result.pickle"


@dataclass(frozen=True)
class Job:
    """A block, one call of it, the threads that the library is for, and where the artefact goes."""

    block: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    threads: int
    into: Path


def run(job: Job, folder: Path) -> tuple[str, str, float]:
    """Compile in this process; `folder` is for what lies around meanwhile."""
    from hf_cpu_accel.compiler import torch_private
    from hf_cpu_accel.compiler.background import artifacts
    from hf_cpu_accel.compiler.background.trace import NotCompiled, compile_block

    start = _cpu_seconds()
    made = folder / "artefact"
    made.mkdir()
    try:
        problem = torch_private.problem()
        if problem is not None:
            raise NotCompiled(problem)
        if not torch_private.has_compiler():
            raise NotCompiled("no C++ compiler found (g++, or what CXX names)")
        compiled = compile_block(job.block, job.args, job.kwargs, made, threads=job.threads)
        return "done", str(artifacts.write(compiled, made, job.into)), _cpu_seconds() - start
    except NotCompiled as reason:
        return "failed", str(reason), _cpu_seconds() - start
    except Exception as error:  # Inductor's own
        first = next(iter(str(error).strip().splitlines()), "")
        return "failed", f"compilation failed: {type(error).__name__}: {first[:160]}", _cpu_seconds() - start


def _cpu_seconds() -> float:
    """Of this process and the compilers that it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main(folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    job = torch.load(folder / JOB, weights_only=False)
    kind, text, _ = run(job, folder)
    partial = folder / f"{RESULT}.new"
    partial.write_bytes(pickle.dumps((kind, text, _cpu_seconds())))
    partial.rename(folder / RESULT)


if __name__ == "__main__":
    # As the module that others import it from: the job's class must be the same class.
    from hf_cpu_accel.compiler.background import worker

    worker.main(Path(sys.argv[1]))
