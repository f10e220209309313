"""Starting a system's worker: the project's own with this interpreter, a rival with that of its environment."""

from __future__ import annotations

import os
import sys

from benchmarks.driver import Worker, WorkerError
from benchmarks.peers import cases, setup
from benchmarks.peers.registry import PEERS
from hf_cpu_accel.runtime.home import home_folder
from hf_cpu_accel.runtime.threads import apply_threads


def start(workload: str, system: str, threads: int | None) -> Worker:
    """A worker that prepares `system`; WorkerError for a rival whose environment is not there.

    `threads` None means the number that this package chooses for the machine, for rivals too.
    """
    folder = home_folder() / "bench" / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{workload.replace(':', '_')}.{system}.log"
    if system not in PEERS:
        command = [sys.executable, "-m", "benchmarks.worker", workload, system, str(threads or "")]
        return Worker(system, command, os.environ, log)
    environment, module = PEERS[system]
    reason = setup.missing(environment)
    if reason is not None:
        raise WorkerError(f"{system} {reason}")
    count = str(apply_threads(threads).count)
    case = str(cases.folder(workload))
    command = [str(setup.python(environment)), "-m", "benchmarks.peers.worker", module, system, case, count]
    # PYTHONPATH would bring this package and its libraries into the rival's environment.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"OMP_NUM_THREADS": count, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return Worker(system, command, environ, log)
