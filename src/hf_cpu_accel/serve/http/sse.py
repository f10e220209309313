"""Server-sent events: one JSON after another, as OpenAI streams them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from hf_cpu_accel.serve.http.errors import openai_error, refused


class _EventStream(StreamingResponse):
    """Calls `on_end` however it ends. Its chunks cannot: an iterator that was never begun has no `finally` to run."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], object], **options: Any) -> None:
        super().__init__(events, **options)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def event_stream(chunks: AsyncIterator[BaseModel], on_end: Callable[[], object]) -> StreamingResponse:
    """A response of these chunks and the mark of the end. An error in between, too late for a status, is an event itself.

    Args:
        chunks: fields that were set are sent, also where they are null, as OpenAI sends `finish_reason`.
        on_end: is called when the last chunk was sent, or the client has left, be it before the first one.
    """

    async def events() -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
        except Exception as error:
            yield f"data: {json.dumps(openai_error(refused(error)))}\n\n"
            return
        yield "data: [DONE]\n\n"

    return _EventStream(
        events(), on_end, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )
