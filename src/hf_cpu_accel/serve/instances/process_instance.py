"""An instance that is a process, forked with the packed weights in it: for models whose time goes into Python.

It is killed without harm to others: what it was at work on fails with `InstanceDied`, and another takes its place.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from hf_cpu_accel.serve.instances import messages
from hf_cpu_accel.serve.instances.fork_server import Child, ForkServer
from hf_cpu_accel.serve.instances.placement import Place
from hf_cpu_accel.serve.instances.thread_instance import take
from hf_cpu_accel.serve.instances.work import Failed, Request, Work

_PATIENCE = 5.0  # seconds for a process to end by itself


class InstanceDied(RuntimeError):
    """The process that was at work on an item has ended: it was killed, or it crashed. Other items are not touched."""


class ProcessInstance:
    """The parent's side; used by one thread."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._place: tuple[Place, bool] | None = None
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def move(self, place: Place, pin: bool) -> None:
        """From now on compute at `place`."""
        self._place = place, pin
        self.heal()
        self._ask(self._place)

    def run(self, request: Request) -> Any:
        """
        Raises:
            InstanceDied: the process ended meanwhile.
            Exception: what the call raised.
        """
        message = messages.dumps(request)
        self.heal()
        reply = self._ask(message)
        if isinstance(reply, Failed):
            raise reply.error
        return reply

    def heal(self) -> None:
        """See to it that there is a process. One that waits has nothing to say: what can be read of it is its end."""
        if self._child is not None and self._child.connection.poll():
            self._drop()
        if self._child is None:
            self._child = self._fork_server.child()
            if self._place is not None:
                self._ask(self._place)

    def close(self) -> None:
        """Let it end, and end it if it does not."""
        if self._child is None:
            return
        pid, connection = self._child
        try:
            connection.send_bytes(messages.dumps(None))
            if not connection.poll(_PATIENCE):
                os.kill(pid, signal.SIGKILL)
        except OSError:  # it has ended already
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
                f"process {pid} of the InstancePool ended while it was at work: killed, or crashed"
            ) from None

    def _drop(self) -> None:
        if self._child is not None:
            self._child.connection.close()
            self._child = None


def serve(work: Work, connection: Connection) -> None:
    """What the process does, until it is told to end or its parent is gone."""
    while True:
        try:
            message = messages.loads(connection.recv_bytes())
            if message is None:
                return
            connection.send_bytes(_answer(work, message))
        except (EOFError, ConnectionError):
            return


def _answer(work: Work, message: Request | tuple[Place, bool]) -> bytes:
    if isinstance(message, tuple):
        take(*message)
        return messages.dumps(None)
    try:
        return messages.dumps_reply(work.do(message))
    except Exception as error:
        return messages.dumps_reply(Failed(error))
