"""A limit for the heads of requests: uvicorn's parser in C keeps whatever comes, where that in Python (h11) has a limit."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.util import find_spec
from typing import Any

_LARGEST = 65536  # bytes, h11's limit


@cache
def http_protocol() -> type[asyncio.Protocol] | str:
    """What uvicorn is to read HTTP with: httptools where it is installed, else what uvicorn chooses."""
    if find_spec("httptools") is None:
        return "auto"
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class LimitedHeads(HttpToolsProtocol):
        """Answers 400 to a head that has not ended after `_LARGEST` bytes."""

        _in_head = False
        _received = 0  # bytes of the head

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
                self.send_400_response(f"The head of the request is larger than {_LARGEST} bytes.")

    protocol: Any = LimitedHeads
    return protocol
