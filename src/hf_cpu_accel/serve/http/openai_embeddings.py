"""`/v1/embeddings`, as OpenAI has it."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from hf_cpu_accel.serve.encoders.encoder import Row
from hf_cpu_accel.serve.encoders.scores import normalized, shortened
from hf_cpu_accel.serve.http.tei import as_json
from hf_cpu_accel.serve.http.tei_schemas import Texts
from hf_cpu_accel.serve.models import Models


class EmbeddingsRequest(BaseModel):
    """The body. truncate is not OpenAI's: it cuts what is too long, which is refused otherwise."""

    model_config = ConfigDict(strict=True, extra="forbid")

    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    truncate: bool = False


def router(models: Models) -> APIRouter:
    """The endpoint around `models`."""
    routes = APIRouter()

    @routes.post("/v1/embeddings")
    async def embeddings(request: EmbeddingsRequest) -> Response:
        encoder = models.find(request.model, "embed")
        encoded = await encoder.encode(request.input, truncate=request.truncate)
        rows = [normalized(shortened(row, request.dimensions)) for row in await encoder.rows(encoded)]
        tokens = sum(len(text.ids) for text in encoded)
        return as_json(
            {
                "object": "list",
                "data": [
                    {
                        "object": "embedding",
                        "index": index,
                        "embedding": _written(row, request.encoding_format),
                    }
                    for index, row in enumerate(rows)
                ],
                "model": encoder.name,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    return routes


def _written(row: Row, encoding: str) -> list[float] | str:
    """As numbers, or as their little-endian float32 bytes in base64."""
    if encoding == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers
