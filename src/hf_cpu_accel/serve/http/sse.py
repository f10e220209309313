"""Server-sent events: one JSON after another, as OpenAI streams them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from hf_cpu_accel.serve.http.errors import refused

logger = logging.getLogger(__name__)


def event_stream(chunks: AsyncIterator[BaseModel]) -> StreamingResponse:
    """A response of these chunks and the mark of the end. An error in between, too late for a status, is an event itself."""

    async def events() -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield f"data: {chunk.model_dump_json(exclude_none=True)}\n\n"
        except Exception as error:
            told = refused(error)
            yield f"data: {json.dumps({'error': {'message': told.message, 'type': 'server_error', 'code': told.code}})}\n\n"
            return
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
