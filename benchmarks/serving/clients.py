"""Clients that send one request after another, with as little work as HTTP allows: the server needs the CPU."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence


class Connection:
    """HTTP/1.1 over one persistent connection, with prepared requests."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._writer.close()

    async def ask(self, request: bytes) -> bytes:
        """The body of the answer.

        Raises:
            RuntimeError: it has another status than 200.
        """
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        )
        body = await self._reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(body.decode())
        return body

    async def stream(self, request: bytes) -> tuple[float, bytes]:
        """When the first event of a streamed answer came, by `time.monotonic()`, and the body as it came, in chunks.

        Raises:
            RuntimeError: it has another status than 200.
        """
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        begun = await self._reader.readuntil(b"\n\n")
        first = time.monotonic()
        return first, begun + await self._reader.readuntil(b"\r\n0\r\n\r\n")


def written(path: str, body: dict[str, object]) -> bytes:
    """Return the bytes of a POST request."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def load(port: int, requests: Sequence[bytes], clients: int, seconds: float) -> list[float]:
    """Seconds that each request took: `clients` of them at a time, for `seconds`, through `requests` again and again."""
    taken: list[float] = []
    following = iter(range(1 << 30))
    end = time.monotonic() + seconds

    async def client() -> None:
        async with Connection(port) as connection:
            while (start := time.monotonic()) < end:
                await connection.ask(requests[next(following) % len(requests)])
                taken.append(time.monotonic() - start)

    await asyncio.gather(*(client() for _ in range(clients)))
    return taken
