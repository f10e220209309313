"""An instance as a forked process that shares the packed weights, for models that spend their time in Python.

A killed process does not affect others: its call fails with `InstanceDied`, and a new process replaces it.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from hf_cpu_accel.serve.instances import messages
from hf_cpu_accel.serve.instances.fork_server import Child, ForkServer
from hf_cpu_accel.serve.instances.placement import Place
from hf_cpu_accel.serve.instances.thread_instance import use_place
from hf_cpu_accel.serve.instances.work import Failed, Request, Work

_PATIENCE = 5.0  # seconds for a process to end by itself


class InstanceDied(RuntimeError):
    """The process ended during a call: it was killed, or it crashed. Other calls are not affected."""


class ProcessInstance:
    """The parent's side of a process; one thread uses it."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._place: tuple[Place, bool] | None = None
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id; None without a process."""
        return None if self._child is None else self._child.pid

    def move(self, place: Place, pin: bool) -> None:
        """Move the process to `place`."""
        self._place = place, pin
        self.heal()
        self._ask(self._place)

    def run(self, request: Request) -> Any:
        """Run a request in the process and return its result.

        Raises:
            InstanceDied: the process ended during the call.
            Exception: the exception of the call.
        """
        message = messages.dumps(request)
        self.heal()
        reply = self._ask(message)
        if isinstance(reply, Failed):
            raise reply.error
        return reply

    def heal(self) -> None:
        """Start a process if there is none. An idle process sends nothing, so readable data means that it has ended."""
        if self._child is not None and self._child.connection.poll():
            self._drop()
        if self._child is None:
            self._child = self._fork_server.child()
            if self._place is not None:
                self._ask(self._place)

    def close(self) -> None:
        """Stop the process; kill it if it does not end in time."""
        if self._child is None:
            return
        pid, connection = self._child
        try:
            connection.send_bytes(messages.dumps(None))
            if not connection.poll(_PATIENCE):
                os.kill(pid, signal.SIGKILL)
        except OSError:  # the process has already ended
            pass
        self._drop()

    def _ask(self, message: bytes | tuple[Place, bool]) -> Any:
        assert self._child is not None
        pid, connection = self._child
        try:
            connection.send_bytes(message if isinstance(message, bytes) else messages.dumps(message))
            return messages.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            self._drop()
            raise InstanceDied(
                f"process {pid} of the InstancePool ended during a call: it was killed (out of memory?) or crashed"
            ) from None

    def _drop(self) -> None:
        if self._child is not None:
            self._child.connection.close()
            self._child = None


def serve(work: Work, connection: Connection) -> None:
    """Run requests in the process until the parent stops it or ends."""
    while True:
        try:
            message = messages.loads(connection.recv_bytes())
            if message is None:
                return
            connection.send_bytes(_reply(work, message))
        except (EOFError, ConnectionError):
            return


def _reply(work: Work, message: Request | tuple[Place, bool]) -> bytes:
    if isinstance(message, tuple):
        use_place(*message)
        return messages.dumps(None)
    try:
        return messages.dumps_reply(work.run(message))
    except Exception as error:
        return messages.dumps_reply(Failed(error))
