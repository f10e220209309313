"""`/v1/completions` of the OpenAI API: text that continues a prompt."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Response
from openai.types.completion import Completion
from openai.types.completion_choice import CompletionChoice
from openai.types.completion_usage import CompletionUsage, PromptTokensDetails

from hf_cpu_accel.serve.engine import Generation
from hf_cpu_accel.serve.http.metrics import Metrics
from hf_cpu_accel.serve.http.openai_schemas import CompletionRequest, TextRequest
from hf_cpu_accel.serve.http.sse import event_stream
from hf_cpu_accel.serve.language.model import LanguageModel
from hf_cpu_accel.serve.language.stream import finish_reason
from hf_cpu_accel.serve.language.text import TextStream
from hf_cpu_accel.serve.models import Models

Answer = tuple[Generation, TextStream]


def router(models: Models, metrics: Metrics) -> APIRouter:
    """Return the endpoint for `models`."""
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def completions(request: CompletionRequest) -> Response:
        model: LanguageModel = models.find(request.model, "generate")
        answers = _begin(model, request)
        head: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }
        if request.stream:
            return event_stream(
                _chunks(model, request, answers[0], metrics, head), on_end=answers[0][0].cancel
            )
        try:
            texts = await asyncio.gather(*(_collect(model, *answer) for answer in answers))
        finally:
            for generation, _ in answers:
                generation.cancel()
        completion = Completion(
            choices=[
                CompletionChoice.model_construct(
                    index=index, text=text, finish_reason=finish_reason(*answer), logprobs=None
                )
                for index, (text, answer) in enumerate(zip(texts, answers, strict=True))
            ],
            object="text_completion",
            usage=count_usage(metrics, model.name, answers),
            **head,
        )
        return Response(completion.model_dump_json(), media_type="application/json")

    return routes


def _begin(model: LanguageModel, request: CompletionRequest) -> list[Answer]:
    """Start the answers to all prompts; if one cannot start, cancel the others."""
    prompts = [model.prompt(prompt) for prompt in request.prompt]
    answers: list[Answer] = []
    try:
        for prompt in prompts:
            generation = model.generate(prompt, request.max_tokens, request.sampling)
            answers.append((generation, model.text(prompt, request.stop)))
    except BaseException:
        for generation, _ in answers:
            generation.cancel()
        raise
    return answers


async def _collect(model: LanguageModel, generation: Generation, text: TextStream) -> str:
    """Return the complete text of an answer."""
    return "".join([str(piece) async for piece in model.pieces(generation, text)])


async def _chunks(
    model: LanguageModel, request: CompletionRequest, answer: Answer, metrics: Metrics, head: dict[str, Any]
) -> AsyncIterator[Completion]:
    head |= null_usage(request)

    def chunk(text: str, reason: str | None = None) -> Completion:
        choice = CompletionChoice.model_construct(index=0, text=text, finish_reason=reason, logprobs=None)
        return Completion.model_construct(choices=[choice], object="text_completion", **head)

    async for piece in model.pieces(*answer):
        yield chunk(str(piece))
    yield chunk("", finish_reason(*answer))
    usage = count_usage(metrics, model.name, [answer])
    if request.includes_usage:
        yield Completion.model_construct(choices=[], object="text_completion", **(head | {"usage": usage}))


def null_usage(request: TextRequest) -> dict[str, None]:
    """Return the `usage` of all chunks but the last: null if the request includes usage, or else nothing."""
    return {"usage": None} if request.includes_usage else {}


def count_usage(metrics: Metrics, model: str, answers: Sequence[Answer]) -> CompletionUsage:
    """Return the `usage` of the OpenAI API, and add its numbers of tokens to the metrics."""
    prompt = sum(generation.prompt_tokens for generation, _ in answers)
    generated = sum(text.tokens for _, text in answers)
    cached = sum(generation.cached_tokens for generation, _ in answers)
    for kind, count in (("prompt", prompt), ("cached", cached), ("generated", generated)):
        metrics.tokens.labels(model, kind).inc(count)
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )
