"""Programs of the documents, each in a process of its own, forked from one that has imported the hosts: half of the time of a short
program goes into that. The package itself is not imported there: a page that forgets to import it fails as it would elsewhere."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

from tests.children import LAST_RESORT

HOSTS = [
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "transformers",
    "sentence_transformers",
    "diffusers",
    "torch_geometric.nn",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(HOSTS)


def run_program(
    source: str, *, folder: Path, environment: Mapping[str, str], cpu_seconds: int = 300
) -> CompletedProcess[str]:
    """Run a program and wait for its end.

    Args:
        source: Python, run as `__main__`.
        folder: where it is run.
        environment: its environment. What the hosts read while they are imported (`HF_HOME`) is that of the first call.
        cpu_seconds: the kernel ends a program that takes more.

    Returns:
        its exit status and what it wrote.
    """
    output, errors = folder / "stdout", folder / "stderr"
    arguments = (source, folder, dict(environment), output, errors, cpu_seconds)
    process = _context.Process(target=_run, args=arguments)
    process.start()
    process.join(LAST_RESORT)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return CompletedProcess([source], process.exitcode, output.read_text(), errors.read_text())


def _run(
    source: str, folder: Path, environment: Mapping[str, str], output: Path, errors: Path, cpu_seconds: int
) -> None:
    for stream, path in ((sys.stdout, output), (sys.stderr, errors)):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = str(folder)
    status = 0
    try:
        exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing ends without them
    sys.exit(status)
