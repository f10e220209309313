"""`/v1/chat/completions` of the OpenAI API: the next message of a chat, with tools if the chat template supports them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Response
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
)
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from transformers.cli.serving.utils import BaseHandler, Modality, ReasoningText, ToolCall

from hf_cpu_accel.serve.http.chat_schemas import ChatRequest, Message
from hf_cpu_accel.serve.http.completions import Answer, count_usage, null_usage
from hf_cpu_accel.serve.http.errors import Refused
from hf_cpu_accel.serve.http.metrics import Metrics
from hf_cpu_accel.serve.http.sse import event_stream
from hf_cpu_accel.serve.language.model import Form, LanguageModel
from hf_cpu_accel.serve.language.parser import Piece
from hf_cpu_accel.serve.language.stream import finish_reason
from hf_cpu_accel.serve.language.text import Prompt
from hf_cpu_accel.serve.models import Models


def router(models: Models, metrics: Metrics) -> APIRouter:
    """Return the endpoint for `models`."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: ChatRequest) -> Response:
        model: LanguageModel = models.find(request.model, "generate")
        prompt = model.chat_prompt(
            _messages(request.messages), request.prompt_tools, request.variables, request.hints
        )
        answer = await _begin(model, request, prompt)
        head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }
        if request.stream:
            return event_stream(_chunks(model, request, answer, metrics, head), on_end=answer[0].cancel)
        message = _message([piece async for piece in model.pieces(*answer)])
        choice = Choice.model_construct(
            index=0, message=message, finish_reason=finish_reason(*answer), logprobs=None
        )
        completion = ChatCompletion.model_construct(
            choices=[choice],
            object="chat.completion",
            usage=count_usage(metrics, model.name, [answer]),
            **head,
        )
        return Response(completion.model_dump_json(), media_type="application/json")

    return routes


async def _begin(model: LanguageModel, request: ChatRequest, prompt: Prompt) -> Answer:
    """Start an answer, with a grammar if the request demands a tool call or JSON."""
    form: Form = "anything"
    mask = None
    # In a thread, because a grammar may take up to a second.
    if request.must_call:
        form, mask = "call", await asyncio.to_thread(model.grammars.call, request.callable_tools)
    elif request.answer_schema is not None:
        form, mask = "JSON", await asyncio.to_thread(model.grammars.json, request.answer_schema)
    text = model.text(prompt, request.stop, form)
    most = request.max_completion_tokens or request.max_tokens
    return model.generate(prompt, most, request.sampling, mask), text


def _messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Convert messages for chat templates, with the conversion of transformers."""
    fields = [message.model_dump(exclude_none=True) for message in messages]
    try:
        converted: list[dict[str, Any]] = BaseHandler.get_processor_inputs_from_messages(fields, Modality.LLM)
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(
            422,
            f"messages: invalid tool_calls ({type(error).__name__}: {error}); expected the format of the OpenAI API",
            parameter="messages",
        ) from error
    return converted


def _message(pieces: list[Piece]) -> ChatCompletionMessage:
    calls = [_call(piece) for piece in _of(pieces, ToolCall)]
    reasoning = "".join(_of(pieces, ReasoningText))
    content = "".join(
        piece for piece in pieces if isinstance(piece, str) and not isinstance(piece, ReasoningText)
    )
    body: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if calls:
        body["tool_calls"] = [ChatCompletionMessageFunctionToolCall.model_validate(call) for call in calls]
    if reasoning:
        body["reasoning_content"] = reasoning  # the name in vLLM and transformers; OpenAI has no such field
    return ChatCompletionMessage.model_validate(body)


def _of(pieces: list[Piece], kind: type) -> list[Any]:
    return [piece for piece in pieces if isinstance(piece, kind)]


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


async def _chunks(
    model: LanguageModel, request: ChatRequest, answer: Answer, metrics: Metrics, head: dict[str, Any]
) -> AsyncIterator[ChatCompletionChunk]:
    head |= null_usage(request)

    def chunk(reason: str | None = None, **delta: Any) -> ChatCompletionChunk:
        choice = ChunkChoice.model_construct(
            index=0, delta=ChoiceDelta.model_validate(delta), finish_reason=reason, logprobs=None
        )
        return ChatCompletionChunk.model_construct(choices=[choice], object="chat.completion.chunk", **head)

    yield chunk(role="assistant", content="")
    calls = 0
    async for piece in model.pieces(*answer):
        if isinstance(piece, ToolCall):
            yield chunk(tool_calls=[{"index": calls, **_call(piece)}])
            calls += 1
        elif isinstance(piece, ReasoningText):
            yield chunk(reasoning_content=str(piece))
        else:
            yield chunk(content=piece)
    yield chunk(finish_reason(*answer))
    usage = count_usage(metrics, model.name, [answer])
    if request.includes_usage:
        yield ChatCompletionChunk.model_construct(
            choices=[], object="chat.completion.chunk", **(head | {"usage": usage})
        )
