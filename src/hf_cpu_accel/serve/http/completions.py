"""`/v1/completions`, as OpenAI has it: text that follows a prompt."""

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
    """The endpoint around `models`."""
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def completions(request: CompletionRequest) -> Response:
        model: LanguageModel = models.find(request.model, "generate")
        answers = _begin(model, request)
        named: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }
        if request.stream:
            return event_stream(
                _chunks(model, request, answers[0], metrics, named), on_end=answers[0][0].cancel
            )
        try:
            texts = await asyncio.gather(*(_whole(model, *answer) for answer in answers))
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
            usage=counted(metrics, model.name, answers),
            **named,
        )
        return Response(completion.model_dump_json(), media_type="application/json")

    return routes


def _begin(model: LanguageModel, request: CompletionRequest) -> list[Answer]:
    """Ask for all, or for none."""
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


async def _whole(model: LanguageModel, generation: Generation, text: TextStream) -> str:
    return "".join([str(piece) async for piece in model.pieces(generation, text)])


async def _chunks(
    model: LanguageModel, request: CompletionRequest, answer: Answer, metrics: Metrics, named: dict[str, Any]
) -> AsyncIterator[Completion]:
    named |= without_usage(request)

    def chunk(text: str, reason: str | None = None) -> Completion:
        choice = CompletionChoice.model_construct(index=0, text=text, finish_reason=reason, logprobs=None)
        return Completion.model_construct(choices=[choice], object="text_completion", **named)

    async for piece in model.pieces(*answer):
        yield chunk(str(piece))
    yield chunk("", finish_reason(*answer))
    usage = counted(metrics, model.name, [answer])
    if request.includes_usage:
        yield Completion.model_construct(choices=[], object="text_completion", **(named | {"usage": usage}))


def without_usage(request: TextRequest) -> dict[str, None]:
    """Return the `usage` of the chunks before the last one: null where the last one has it."""
    return {"usage": None} if request.includes_usage else {}


def counted(metrics: Metrics, model: str, answers: Sequence[Answer]) -> CompletionUsage:
    """OpenAI's numbers of tokens, which the server's own counters get, too."""
    prompt = sum(generation.prompt_tokens for generation, _ in answers)
    written = sum(text.tokens for _, text in answers)
    cached = sum(generation.cached_tokens for generation, _ in answers)
    for kind, count in (("prompt", prompt), ("cached", cached), ("generated", written)):
        metrics.tokens.labels(model, kind).inc(count)
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )
