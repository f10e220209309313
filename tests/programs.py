"""Programs, each in a process of its own, forked from one that has imported the hosts: half of the time of a short program goes
into that. The package itself is not imported there: a page that forgets to import it fails as it would elsewhere."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import IO

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
    source: str,
    *arguments: str,
    folder: Path,
    environment: Mapping[str, str],
    cpu_seconds: int = 300,
) -> CompletedProcess[str]:
    """Run a program and wait for its end.

    Args:
        source: Python, run as `__main__`.
        arguments: of the program, in `sys.argv[1:]`.
        folder: where it is run.
        environment: its environment. What the hosts read while they are imported (`HF_HOME`) is that of the first call.
        cpu_seconds: the kernel ends a program that takes more.

    Returns:
        its exit status and what it wrote.
    """
    output, errors = folder / "stdout", folder / "stderr"
    given = (source, arguments, folder, dict(environment), output, errors, cpu_seconds)
    process = _context.Process(target=_run, args=given)
    process.start()
    process.join(LAST_RESORT)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return CompletedProcess([source], process.exitcode, output.read_text(), errors.read_text())


class Forked:
    """In the place of `subprocess.Popen` for a Python that talks by pipes (`python -m module ...` or `python -c source ...`).

    Args:
        command, cwd, env, stderr: as there; `stderr` is a file with a name.
        options: of the pipes, which are there and carry text.
    """

    def __init__(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], stderr: IO[str], **options: object
    ) -> None:
        assert command[0] == sys.executable, command
        assert command[1] in ("-m", "-c"), command
        (stdin, given), (answers, stdout) = Pipe(duplex=False), Pipe(duplex=False)
        arguments = (list(command[1:]), cwd, dict(env), stdin, stdout, stderr.name)
        self._process = _context.Process(target=_run_command, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdin, self.stdout = (
            os.fdopen(os.dup(end.fileno()), mode) for end, mode in ((given, "w"), (answers, "r"))
        )
        for end in (stdin, given, answers, stdout):
            end.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired([], timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _run_command(
    arguments: list[str],
    folder: Path,
    environment: Mapping[str, str],
    stdin: Connection,
    stdout: Connection,
    errors: str,
) -> None:
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    sys.stdin = os.fdopen(0)
    with open(errors, "a") as file:
        os.dup2(file.fileno(), 2)
    for end in (stdin, stdout):
        end.close()
    kind, program, *rest = arguments
    sys.argv = [program if kind == "-m" else kind, *rest]
    run = partial(runpy.run_module, program, run_name="__main__", alter_sys=True)
    _as_program(folder, environment, run if kind == "-m" else partial(_execute, program))


def _run(
    source: str,
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    output: Path,
    errors: Path,
    cpu_seconds: int,
) -> None:
    for stream, path in ((sys.stdout, output), (sys.stderr, errors)):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    sys.argv = ["-c", *arguments]
    _as_program(folder, environment, partial(_execute, source))


def _execute(source: str) -> None:
    exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})


def _as_program(folder: Path, environment: Mapping[str, str], run: Callable[[], object]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = str(folder)
    try:
        run()
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing ends without them
