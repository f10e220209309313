"""`/v1/embeddings` of the OpenAI API."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from hf_cpu_accel.serve.encoders.encoder import Row
from hf_cpu_accel.serve.encoders.scores import normalize, shorten
from hf_cpu_accel.serve.http.tei import as_json
from hf_cpu_accel.serve.http.tei_schemas import Texts
from hf_cpu_accel.serve.models import Models


class EmbeddingsRequest(BaseModel):
    """The body of `POST /v1/embeddings`. `truncate`, an extension, cuts long texts, which are rejected otherwise."""

    model_config = ConfigDict(strict=True, extra="forbid")

    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    truncate: bool = False


def router(models: Models) -> APIRouter:
    """Return the endpoint for `models`."""
    routes = APIRouter()

    @routes.post("/v1/embeddings")
    async def embeddings(request: EmbeddingsRequest) -> Response:
        encoder = models.find(request.model, "embed")
        encoded = await encoder.encode(request.input, truncate=request.truncate)
        rows = [normalize(shorten(row, request.dimensions)) for row in await encoder.rows(encoded)]
        tokens = sum(len(text.ids) for text in encoded)
        return as_json(
            {
                "object": "list",
                "data": [
                    {
                        "object": "embedding",
                        "index": index,
                        "embedding": _encode(row, request.encoding_format),
                    }
                    for index, row in enumerate(rows)
                ],
                "model": encoder.name,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    return routes


def _encode(row: Row, encoding: str) -> list[float] | str:
    """Return a row as numbers, or as little-endian float32 bytes in base64."""
    if encoding == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers
