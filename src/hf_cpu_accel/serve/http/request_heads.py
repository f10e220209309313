"""A size limit for request headers: the C parser of uvicorn has none, while the Python parser (h11) has one."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.util import find_spec
from typing import Any

_LARGEST = 65536  # bytes, the limit of h11


@cache
def http_protocol() -> type[asyncio.Protocol] | str:
    """Return the HTTP protocol for uvicorn: httptools with a limit if it is installed, or else "auto"."""
    if find_spec("httptools") is None:
        return "auto"
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class LimitedHeads(HttpToolsProtocol):
        """Answer 400 to headers that have not ended after `_LARGEST` bytes."""

        _in_head = False
        _received = 0  # bytes of the headers

        def on_message_begin(self) -> None:
            self._in_head, self._received = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._received += len(data)
            if self._in_head and self._received > _LARGEST and not self.transport.is_closing():
                self.send_400_response(f"The headers are too large; at most {_LARGEST} bytes are accepted.")

    protocol: Any = LimitedHeads
    return protocol
