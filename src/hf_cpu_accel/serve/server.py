"""uvicorn with an end that loses nothing: at SIGTERM what runs is finished, and what comes is told so."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.http.request_heads import http_protocol

_CONNECTIONS = 65536


class Server(uvicorn.Server):
    """Serves until SIGTERM or Ctrl-C; a second one ends it at once.

    Args:
        service: the application.
        host, port: where it listens; port 0 is a free one.
        grace: seconds that running requests have after the first signal.
        on_start: is called with the address once the port is open.
    """

    def __init__(
        self,
        service: Service,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        grace: float = 60.0,
        on_start: Callable[[str], object] | None = None,
    ) -> None:
        config = uvicorn.Config(
            service.app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            http=http_protocol(),
            ws="none",
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(grace)),
        )
        super().__init__(config)
        self.service, self.grace, self._on_start = service, grace, on_start
        self._told_to_stop: float | None = None
        self.url = ""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """At the first signal, close the gate; at the second, leave."""
        if self._told_to_stop is not None:
            super().handle_exit(sig, frame)
            return
        self._told_to_stop = time.monotonic()
        self.service.gate.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if self._on_start is not None:
            self._on_start(self.url)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; True ends the main loop."""
        if self._told_to_stop is not None:
            late = time.monotonic() - self._told_to_stop > self.grace
            self.should_exit |= late or not self.service.gate.running
        return await super().on_tick(counter)


def serve(server: Server) -> None:
    """Run until the server is told to stop, then close its models."""
    _allow_connections()
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it has ended
        server.run()
    for served in server.service.models:
        served.close(timeout=1.0)


def _allow_connections() -> None:
    """As many open files as this process may have: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, _CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
