"""`/embed`, `/rerank` and `/predict` of text-embeddings-inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Response
from pydantic_core import to_json

from hf_cpu_accel.serve.encoders.encoder import Encoder, Row
from hf_cpu_accel.serve.encoders.scores import normalize, probabilities, shorten
from hf_cpu_accel.serve.encoders.tokenizing import Direction, Encoded, Text
from hf_cpu_accel.serve.http.errors import Refused
from hf_cpu_accel.serve.http.tei_schemas import (
    EmbedRequest,
    EncoderRequest,
    PredictRequest,
    RerankRequest,
    is_one,
    texts_or_pairs,
)
from hf_cpu_accel.serve.models import Models


def router(models: Models) -> APIRouter:
    """Return the endpoints for `models`."""
    routes = APIRouter()

    @routes.post("/embed")
    async def embed(request: EmbedRequest) -> Response:
        encoder = models.find(request.model, "embed")
        rows = await _rows(encoder, request, with_prompt(encoder, request.inputs, request.prompt_name))
        rows = [shorten(row, request.dimensions) for row in rows]
        return as_json([(normalize(row) if request.normalize else row).tolist() for row in rows])

    @routes.post("/rerank")
    async def rerank(request: RerankRequest) -> Response:
        encoder = models.find(request.model, "rerank")
        rows = await _rows(encoder, request, [(request.query, text) for text in request.texts])
        scores = [_scores(encoder, row, request.raw_scores)[0] for row in rows]
        ranks: list[dict[str, Any]] = [
            {"index": index, "score": scores[index]}
            for index in np.argsort(-np.array(scores), kind="stable").tolist()
        ]
        if request.return_text:
            ranks = [{**rank, "text": request.texts[rank["index"]]} for rank in ranks]
        return as_json(ranks)

    @routes.post("/predict")
    async def predict(request: PredictRequest) -> Response:
        encoder = models.find(request.model, "predict")
        rows = await _rows(encoder, request, texts_or_pairs(request.inputs))
        predicted = [_predictions(encoder, row, request.raw_scores) for row in rows]
        return as_json(predicted[0] if is_one(request.inputs) else predicted)

    return routes


def as_json(content: Any) -> Response:
    """Return a JSON response, encoded by pydantic, which is ten times faster than `json` for vectors."""
    return Response(to_json(content, inf_nan_mode="null"), media_type="application/json")


def with_prompt(encoder: Encoder, texts: Sequence[Text], prompt_name: str | None) -> list[Text]:
    """Return `texts` with the named prompt in front of each.

    Raises:
        Refused: the model has no such prompt, or a text is a list of token ids.
    """
    if prompt_name is None:
        return list(texts)
    prompts = encoder.loaded.prompts
    if prompt_name not in prompts:
        accepted = ", ".join(sorted(prompts)) or "none, the model has no prompts"
        raise Refused(422, f"prompt_name={prompt_name!r} is unknown; accepted: {accepted}")
    if not all(isinstance(text, str) for text in texts):
        raise Refused(
            422,
            f"prompt_name={prompt_name!r} is not supported with token ids; pass texts, or leave prompt_name out",
        )
    return [prompts[prompt_name] + str(text) for text in texts]


async def _rows(encoder: Encoder, request: EncoderRequest, texts: Sequence[Text]) -> list[Row]:
    direction: Direction = "left" if request.truncation_direction.lower() == "left" else "right"
    encoded: list[Encoded] = await encoder.encode(texts, truncate=bool(request.truncate), direction=direction)
    return await encoder.rows(encoded)


def _scores(encoder: Encoder, logits: Row, raw: bool) -> list[float]:
    scores: list[float] = (logits if raw else probabilities(logits, encoder.loaded.multi_label)).tolist()
    return scores


def _predictions(encoder: Encoder, logits: Row, raw: bool) -> list[dict[str, Any]]:
    """Return the labels and their scores, the highest score first."""
    labels = encoder.loaded.labels or []
    scored = sorted(zip(_scores(encoder, logits, raw), labels, strict=True), key=lambda pair: -pair[0])
    return [{"score": score, "label": label} for score, label in scored]
