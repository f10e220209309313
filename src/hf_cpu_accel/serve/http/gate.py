"""Who and what gets in: the API key, the size of bodies, and nothing once the server is to stop."""

from __future__ import annotations

import asyncio
import contextlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_cpu_accel.serve.http.errors import Refused, answer

OPEN = frozenset({"/health"})  # who watches a server need not have its key
# Of a body that is too large: many clients read no answer before they have sent all of it.
_DISCARDED = 64 << 20
_BODY_SECONDS = 60.0  # for a client that sends a request and not its end


class Gate:
    """Refuses a request before it is parsed, or reads its body and hands it on.

    While an answer is made, the client is listened to: if it leaves, the task that makes the answer is cancelled.

    Args:
        app: who gets what is let in.
        api_key: what clients have to send as `Authorization: Bearer KEY`; None lets everybody in.
        max_body: bytes.
        max_upload: bytes of a body of the type multipart/form-data.
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
            await answer(scope["path"], error)(scope, receive, send)
        finally:
            self.running -= 1

    def _check(self, path: str, headers: Headers) -> None:
        if self.closed:
            raise Refused(503, "the service is stopping", "server_stopping")
        if self._key is None or path in OPEN:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        matches = hmac.compare_digest(key.strip().encode(), self._key)  # takes as long for any key
        if scheme.lower() != "bearer" or not matches:
            raise Refused(401, "send the API key as the header Authorization: Bearer KEY", "invalid_api_key")

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body; None if the client left before its end."""
        uploads = headers.get("content-type", "").startswith("multipart/form-data")
        most = self.max_upload if uploads else self.max_body
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > most + _DISCARDED:
            raise _too_large(most)
        try:
            return await asyncio.wait_for(_read(receive, most), _BODY_SECONDS)
        except asyncio.TimeoutError as error:
            raise Refused(408, f"the body did not come within {_BODY_SECONDS:.0f} seconds") from error


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
    return Refused(413, f"the body is larger than {most} bytes", "request_too_large")


async def _while_connected(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run `app` on a request with this body; cancel it when the client leaves."""
    given = [{"type": "http.request", "body": body, "more_body": False}]
    left = asyncio.Event()

    async def replay() -> Message:
        if given:
            return given.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()
        answering.cancel()

    answering = asyncio.ensure_future(app(scope, replay, send))
    listening = asyncio.ensure_future(listen())
    try:
        await answering
    except asyncio.CancelledError:
        if not left.is_set():  # the server itself gives up
            answering.cancel()
            raise
    finally:
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
