"""The gate in front of the endpoints: it checks the API key and the size of bodies, and closes when the server stops."""

from __future__ import annotations

import asyncio
import contextlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_cpu_accel.serve.http.errors import Refused, error_response

OPEN = frozenset({"/health"})  # paths without an API key, for monitoring
# Bytes of a too large body that are read and discarded: many clients read the response only after sending their body.
_DISCARDED = 64 << 20
_BODY_SECONDS = 60.0  # for a client to send its body


class Gate:
    """Reject a request before it is parsed, or read its body and pass it on.

    If the client disconnects, the task of its request is cancelled.

    Args:
        app: the application behind the gate.
        api_key: the key that clients must send as `Authorization: Bearer KEY`; None checks no key.
        max_body: maximum size of a body in bytes.
        max_upload: maximum size of a multipart/form-data body in bytes.
    """

    def __init__(
        self, app: ASGIApp, *, api_key: str | None = None, max_body: int = 2 << 20, max_upload: int = 25 << 20
    ) -> None:
        self.app, self.max_body, self.max_upload = app, max_body, max_upload
        self._key = None if api_key is None else api_key.encode()
        self.running = 0
        self.closed = False

    @property
    def has_key(self) -> bool:
        return self._key is not None

    def close(self) -> None:
        """Answer new requests with 503."""
        self.closed = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.running += 1
        try:
            headers = Headers(scope=scope)
            self._check(scope["path"], headers)
            body = await self._body(headers, receive)
            if body is not None:
                await _while_connected(self.app, scope, body, receive, send)
        except Refused as error:
            await error_response(scope["path"], error)(scope, receive, send)
        finally:
            self.running -= 1

    def _check(self, path: str, headers: Headers) -> None:
        if self.closed:
            raise Refused(503, "the server is stopping; try again later", "server_stopping")
        if self._key is None or path in OPEN:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        matches = hmac.compare_digest(key.strip().encode(), self._key)  # in constant time
        if scheme.lower() != "bearer" or not matches:
            problem = "is wrong" if scheme else "is missing"
            raise Refused(
                401,
                f"the API key {problem}; send it in the header Authorization: Bearer KEY",
                "invalid_api_key",
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the body; None if the client disconnected before its end."""
        is_upload = headers.get("content-type", "").startswith("multipart/form-data")
        most = self.max_upload if is_upload else self.max_body
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > most + _DISCARDED:
            raise _too_large(most)
        try:
            return await asyncio.wait_for(_read(receive, most), _BODY_SECONDS)
        except asyncio.TimeoutError as error:
            raise Refused(
                408,
                f"the body did not arrive within {_BODY_SECONDS:.0f} seconds; send it faster or in smaller requests",
            ) from error


async def _read(receive: Receive, most: int) -> bytes | None:
    body, size = bytearray(), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        size += len(message.get("body", b""))
        if size <= most:
            body += message.get("body", b"")
        elif size > most + _DISCARDED:
            raise _too_large(most)
        if not message.get("more_body", False):
            break
    if size > most:
        raise _too_large(most)
    return bytes(body)


def _too_large(most: int) -> Refused:
    return Refused(413, f"the body is too large; at most {most} bytes are accepted", "request_too_large")


async def _while_connected(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run `app` on a request with this body; cancel it if the client disconnects."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    disconnected = asyncio.Event()

    async def replay() -> Message:
        if messages:
            return messages.pop()
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected.set()
        response.cancel()

    response = asyncio.ensure_future(app(scope, replay, send))
    listener = asyncio.ensure_future(listen())
    try:
        await response
    except asyncio.CancelledError:
        if not disconnected.is_set():  # the server cancels the request
            response.cancel()
            raise
    finally:
        listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listener
