"""uvicorn with a graceful end: after SIGTERM running requests finish, and new ones are rejected."""

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
    """Serve until SIGTERM or Ctrl-C; a second signal stops the server at once.

    Args:
        service: the application.
        host: address to listen on.
        port: port to listen on; 0 chooses a free port.
        grace: seconds that running requests have to finish after the first signal.
        on_start: called with the URL once the port is open.
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
        self._stop_time: float | None = None
        self.url = ""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Close the gate at the first signal; stop at the second."""
        if self._stop_time is not None:
            super().handle_exit(sig, frame)
            return
        self._stop_time = time.monotonic()
        self.service.gate.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port, and call `on_start` with the URL."""
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if self._on_start is not None:
            self._on_start(self.url)

    async def on_tick(self, counter: int) -> bool:
        """Return True to end the main loop; uvicorn calls this ten times per second."""
        if self._stop_time is not None:
            late = time.monotonic() - self._stop_time > self.grace
            self.should_exit |= late or not self.service.gate.running
        return await super().on_tick(counter)


def serve(server: Server) -> None:
    """Run the server until it stops, then close its models."""
    _allow_connections()
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again at its end
        server.run()
    for served in server.service.models:
        served.close(timeout=1.0)


def _allow_connections() -> None:
    """Raise the limit of open files, because each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, _CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
