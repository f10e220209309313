"""One thread that compiles in child processes, one child at a time, so that the user's process is not slowed down."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from hf_cpu_accel.compiler.background import worker
from hf_cpu_accel.compiler.background.worker import Job, Result
from hf_cpu_accel.runtime.home_folder import cache_folder
from hf_cpu_accel.runtime.private_files import make_folder

_queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_lock = threading.Lock()
_thread: threading.Thread | None = None
# No child starts before this, so that the first calls of a process have all cores.
_GRACE_SECONDS = 2.0
_first_task = 0.0  # the time of the first task
_child: subprocess.Popen[bytes] | None = None
_PROGRAM = f"""
import sys
from pathlib import Path
sys.path[:] = filter(None, sys.path)
from {worker.__name__} import main
main(Path(sys.argv[1]))
"""


def submit(task: Callable[[], None]) -> None:
    """Run `task` on the thread, after earlier tasks. The task must not raise."""
    global _thread, _first_task
    with _lock:
        if _thread is None:
            _first_task = time.monotonic()
            _thread = threading.Thread(target=_work, name="hf_cpu_accel-compile", daemon=True)
            _thread.start()
            atexit.register(_stop)
    _queue.put(task)


def compile_here(job: Job) -> Result:
    """Compile in this process."""
    with _scratch() as folder:
        return worker.run(job, Path(folder))


def compile_in_child(job: Job) -> Result:
    """Compile in a child process of the lowest priority, and wait for its result."""
    global _child
    time.sleep(max(0.0, _first_task + _GRACE_SECONDS - time.monotonic()))
    with _scratch() as name, tempfile.TemporaryFile(dir=name) as sent:
        folder, log = Path(name), Path(name) / "log"
        try:
            torch.save(job, sent)
        except Exception as error:  # the pickling of a foreign class may raise anything
            return "failed", f"it cannot be pickled for the compiling process ({error})", 0.0
        sent.seek(0)
        with log.open("wb") as file:
            child = _child = _start(folder, sent, file)
            _yield_to_us(child.pid)
            child.wait()
            _child = None
        try:
            result = worker.result(folder)
        except ValueError as error:
            return "failed", f"the compiling process wrote a damaged result: {error}", 0.0
        if result is not None:
            return result
        lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
        return "failed", f"the compiling process exited with code {child.returncode}: {lines[-1][:160]}", 0.0


def _start(folder: Path, job: IO[bytes], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the child with the import path of this process.

    The current folder is not on that path, because any user may have written to it.
    """
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _PROGRAM, str(folder)]
    return subprocess.Popen(
        command, env=environment, stdin=job, stdout=log, stderr=log, start_new_session=True
    )


def _yield_to_us(child: int) -> None:
    """Give the child the lowest priority from its start: importing torch alone takes seconds.

    With sched_autogroup Linux schedules sessions against each other, and priorities count only inside a session. So the child's
    session gets the lowest priority, too.
    """
    with contextlib.suppress(OSError):  # the child has ended already, or there is no such file
        os.setpriority(os.PRIO_PROCESS, child, 19)
        Path(f"/proc/{child}/autogroup").write_text("19")


def _scratch() -> tempfile.TemporaryDirectory[str]:
    folder = make_folder(cache_folder("jobs"))
    return tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True)


def _work() -> None:
    while True:
        _queue.get()()


def _forget() -> None:
    """Forget the thread and the child in a forked process, which has neither."""
    global _thread, _child, _lock
    _thread, _child, _lock = None, None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _stop() -> None:
    """Stop the child and its compilers at exit, and remove the scratch folder."""
    child = _child
    if child is None or child.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(timeout=2)
        except subprocess.TimeoutExpired:  # it has the lowest priority, and the machine may be busy
            os.killpg(child.pid, signal.SIGKILL)
    shutil.rmtree(str(child.args[-1]), ignore_errors=True)  # type: ignore[index]
