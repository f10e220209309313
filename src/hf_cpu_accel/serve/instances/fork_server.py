"""The fork server: a process that only forks instances. The pool forks it at its creation; it never computes or starts a thread.

So a process with several threads, which may hold locks, is forked only once. The instances share the memory pages of the packed
weights, which they only read. The forkserver of `multiprocessing` starts a new Python without these pages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

_PID = struct.Struct("q")


class Child(NamedTuple):
    """A process, and the parent's end of the pipe to it, which is closed when the process ends."""

    pid: int
    connection: Connection


class ForkServer:
    """Create children that run `serve` on their end of a pipe."""

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self._serve = serve
        self._one_at_a_time = threading.Lock()
        self.pid, self._control = self._open()

    def child(self) -> Child:
        """Start a process.

        Raises:
            OSError: the system cannot fork.
        """
        with self._one_at_a_time:
            try:
                return self._request_child()
            except (EOFError, ConnectionError):  # the fork server was killed
                self._close()
                self.pid, self._control = self._open()
                return self._request_child()

    def close(self) -> None:
        """Stop the fork server; its children end when their pipes are closed."""
        with self._one_at_a_time:
            self._close()

    def _open(self) -> tuple[int, socket.socket]:
        parent_end, child_end = socket.socketpair()
        _ends.add(parent_end)
        pid = _fork(lambda: _run_server(child_end, self._serve))
        child_end.close()
        return pid, parent_end

    def _close(self) -> None:
        self._control.close()
        with contextlib.suppress(
            ProcessLookupError, ChildProcessError
        ):  # other code that waits for all children may be first
            os.kill(self.pid, signal.SIGKILL)  # it has no state to lose
            os.waitpid(self.pid, 0)

    def _request_child(self) -> Child:
        parent_end, child_end = socket.socketpair()
        try:
            socket.send_fds(self._control, [b"+"], [child_end.fileno()])
            reply = self._control.recv(_PID.size, socket.MSG_WAITALL)
        except BaseException:
            parent_end.close()
            raise
        finally:
            child_end.close()
        if len(reply) < _PID.size:
            parent_end.close()
            raise EOFError
        (pid,) = _PID.unpack(reply)
        if pid < 0:
            parent_end.close()
            raise OSError(
                -pid,
                f"cannot fork an instance: {os.strerror(-pid)}; free memory or raise the limit of processes",
            )
        connection = Connection(parent_end.detach())
        _ends.add(connection)
        return Child(pid, connection)


# The ends of the pipes of this process. Forked processes close them; open copies would hide the end of this process.
_ends: weakref.WeakSet[socket.socket | Connection] = weakref.WeakSet()


def _close_ends() -> None:
    for end in list(_ends):
        end.close()


os.register_at_fork(after_in_child=_close_ends)


def _run_server(control: socket.socket, serve: Callable[[Connection], None]) -> None:
    """Fork an instance per request on `control`, until it is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes children that have ended
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not request:
            return
        pipe = descriptors[0]

        def run_instance(pipe: int = pipe) -> None:
            control.close()
            serve(Connection(pipe))

        try:
            pid = _fork(run_instance)
        except OSError as error:
            pid = -(error.errno or 1)
        os.close(pipe)
        control.sendall(_PID.pack(pid))


def _fork(run: Callable[[], None]) -> int:
    """Fork a process that calls `run` and ends; return its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent handles it
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
