"""A process that does nothing but fork instances: it was forked when the pool was made, and never computes or starts a thread.

A process of many threads is not forked twice, with locks that one of them may hold. The instances share the pages of the weights as
they were packed, since they are only read; `multiprocessing`'s forkserver starts Python anew, without them.
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
    """A process, and the parent's end of the pipe to it: that reads as closed as soon as the process has ended."""

    pid: int
    connection: Connection


class ForkServer:
    """Makes children that run `serve` on their end of a pipe."""

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self._serve = serve
        self._one_at_a_time = threading.Lock()
        self.pid, self._control = self._open()

    def child(self) -> Child:
        """A new process.

        Raises:
            OSError: the system has no room for one.
        """
        with self._one_at_a_time:
            try:
                return self._fork_there()
            except (EOFError, ConnectionError):  # the fork server itself was killed
                self._close()
                self.pid, self._control = self._open()
                return self._fork_there()

    def close(self) -> None:
        """End the fork server; its children end when their pipes are closed."""
        with self._one_at_a_time:
            self._close()

    def _open(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        _ends.add(ours)
        pid = _fork(lambda: _wait_for_orders(theirs, self._serve))
        theirs.close()
        return pid, ours

    def _close(self) -> None:
        self._control.close()
        with contextlib.suppress(
            ProcessLookupError, ChildProcessError
        ):  # who waits for all children of this process may be first
            os.kill(self.pid, signal.SIGKILL)  # it holds nothing that could be lost
            os.waitpid(self.pid, 0)

    def _fork_there(self) -> Child:
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            reply = self._control.recv(_PID.size, socket.MSG_WAITALL)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        if len(reply) < _PID.size:
            ours.close()
            raise EOFError
        (pid,) = _PID.unpack(reply)
        if pid < 0:
            ours.close()
            raise OSError(-pid, f"an instance cannot be forked: {os.strerror(-pid)}")
        connection = Connection(ours.detach())
        _ends.add(connection)
        return Child(pid, connection)


# The ends of this process's pipes. In a forked process they would keep the other ends from seeing that this process is gone.
_ends: weakref.WeakSet[socket.socket | Connection] = weakref.WeakSet()


def _close_ends() -> None:
    for end in list(_ends):
        end.close()


os.register_at_fork(after_in_child=_close_ends)


def _wait_for_orders(control: socket.socket, serve: Callable[[Connection], None]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is gone, without a wait
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not order:
            return
        pipe = descriptors[0]

        def be_an_instance(pipe: int = pipe) -> None:
            control.close()
            serve(Connection(pipe))

        try:
            pid = _fork(be_an_instance)
        except OSError as error:
            pid = -(error.errno or 1)
        os.close(pipe)
        control.sendall(_PID.pack(pid))


def _fork(run: Callable[[], None]) -> int:
    """The number of a new process that does `run` and ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the parent says what becomes of it
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
