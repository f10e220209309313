"""Server-sent events with JSON, in the streaming format of the OpenAI API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from hf_cpu_accel.serve.http.errors import openai_error, refused


class _EventStream(StreamingResponse):
    """Call `on_end` at any end of the response. The chunks cannot: an iterator that never started runs no `finally`."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], object], **options: Any) -> None:
        super().__init__(events, **options)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def event_stream(chunks: AsyncIterator[BaseModel], on_end: Callable[[], object]) -> StreamingResponse:
    """Return a response that streams the chunks and `[DONE]`. An error after the start becomes an event.

    Args:
        chunks: the chunks. Fields that were set are sent, also null ones such as `finish_reason`.
        on_end: called after the last chunk, or when the client disconnects, even before the first chunk.
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
