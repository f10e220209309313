"""Start a system's worker: the project's own with this interpreter, a rival with that of its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.driver import Worker, WorkerError
from benchmarks.generation import cases as generation_cases
from benchmarks.peers import cases, setup
from benchmarks.peers.registry import GENERATORS, PEERS
from hf_cpu_accel.runtime.home_folder import home_folder
from hf_cpu_accel.runtime.private_files import make_folder
from hf_cpu_accel.runtime.threads import apply_threads


def start(workload: str, system: str, threads: int | None) -> Worker:
    """Return a worker that prepares `system`. Raises WorkerError for a rival without its environment.

    `threads` None means the number that this package chooses for the machine, for rivals too.
    """
    if system not in PEERS:
        return _own(system, workload, ["benchmarks.worker", workload, system, str(threads or "")])
    environment, module = PEERS[system]
    count = _usable(system, environment, threads)
    case = str(cases.folder(workload))
    return _rival(system, workload, environment, ["benchmarks.peers.worker", module, system, case, count])


def start_writer(model: str, system: str, prompt: int, new: int, threads: int | None) -> Worker:
    """Return a worker that generates `new` tokens after `prompt` tokens; `model` is a name of generation/cases.py."""
    lengths = [str(prompt), str(new)]
    if system not in GENERATORS:
        case = str(generation_cases.folder(model))
        arguments = ["benchmarks.generation.worker", system, case, *lengths, str(threads or "")]
        return _own(system, case, arguments)
    environment, module = GENERATORS[system]
    count = _usable(system, environment, threads)
    case = str(generation_cases.folder(model))
    arguments = ["benchmarks.peers.generation_worker", module, system, case, *lengths, count]
    return _rival(system, case, environment, arguments)


def _own(system: str, workload: str, arguments: list[str]) -> Worker:
    return Worker(system, [sys.executable, "-m", *arguments], os.environ, _log(workload, system))


def _rival(system: str, workload: str, environment: str, arguments: list[str]) -> Worker:
    # PYTHONPATH would bring this package and its libraries into the rival's environment.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {
        "OMP_NUM_THREADS": arguments[-1],
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PEER_FOLDER": str(setup.folder(environment)),
    }
    command = [str(setup.python(environment)), "-m", *arguments]
    return Worker(system, command, environ, _log(workload, system))


def _usable(system: str, environment: str, threads: int | None) -> str:
    """Return the number of threads for a rival. Raises WorkerError without its environment."""
    reason = setup.missing(environment)
    if reason is not None:
        raise WorkerError(f"{system} {reason}")
    return str(apply_threads(threads).count)


def _log(workload: str, system: str) -> Path:
    folder = home_folder() / "bench" / "logs"
    make_folder(folder)
    return folder / f"{Path(workload).name.replace(':', '_')}.{system}.log"
