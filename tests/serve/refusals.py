"""Requests that are refused: bodies with what the error says of them, and requests that do not pass the gate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from hf_cpu_accel.serve.encoders.encoder import Encoder
from hf_cpu_accel.serve.http import gate
from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.http.chat_schemas import ChatRequest
from hf_cpu_accel.serve.http.openai_schemas import CompletionRequest
from tests.serve import sounds

CHAT = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
FILE = {"file": ("a.wav", sounds.wav(sounds.tone()))}

# Endpoint: its schema, and the fields that it needs.
TEXT: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"model": "writer", "prompt": "a", "max_tokens": 1}),
    "/v1/chat/completions": (ChatRequest, {"model": "writer", "messages": CHAT, "max_tokens": 1}),
}
# A value of each field that asks for something; fields whose type depends on the endpoint have several.
ASKING: dict[str, list[Any]] = {
    "audio": [{"voice": "alloy", "format": "wav"}],
    "best_of": [2],
    "echo": [True],
    "frequency_penalty": [0.2, False],
    "function_call": ["auto", {"name": "weather"}],
    "functions": [[{"name": "weather"}], []],
    "logit_bias": [{"5": 100}],
    "logprobs": [True, 1, 0],
    "modalities": [["text", "audio"]],
    "n": [2, True, "1"],
    "parallel_tool_calls": [False],
    "prediction": [{"type": "content", "content": "x" * 10_000}],
    "presence_penalty": [0.5],
    "store": [True],
    "suffix": ["end"],
    "top_logprobs": [5],
    "verbosity": ["low"],
    "web_search_options": [{}],
}


WRONG: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("/v1/completions", {"prompt": 5}, "prompt", "prompt: expected a text, a list of texts"),
    ("/v1/completions", {"prompt": "a", "stop": [""]}, "stop", "none of them empty; got ['']"),
    (
        "/v1/completions",
        {"prompt": ["a", "b"], "stream": True},
        "stream",
        "stream=True is not supported with 2",
    ),
    (
        "/v1/completions",
        {"prompt": "a", "max_tokens": -5},
        "max_tokens",
        "greater than or equal to 1; got -5",
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "tool_choice": "required"},
        "tool_choice",
        "accepted: 'auto', 'none'",
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rain"}}},
        "tool_choice",
        "tool_choice='rain' needs a tool that is not in tools; accepted: 'auto', 'none', 'required', 'weather'",
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "tools": TOOLS, "response_format": {"type": "json_object"}},
        "response_format",
        "response_format is not supported with tools; leave out tools, or pass tool_choice='none'",
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "response_format": {"type": "json_schema"}},
        "response_format",
        "type='json_schema': json_schema is missing",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages.0",
        "content parts of type 'image_url' are not supported; accepted: 'text'",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        "messages",
        "messages: invalid tool_calls",
    ),
    ("/v1/embeddings", {"input": 5}, "input", "input: expected a text, a list of texts"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "; got 'int8'"),
]


TEI: list[tuple[str, dict[str, Any], str]] = [
    ("/embed", {"inputs": 5}, "inputs: expected a text, a list of texts"),
    (
        "/embed",
        {"inputs": "a", "prompt_name": "passage"},
        "prompt_name='passage' is unknown; accepted: query",
    ),
    (
        "/embed",
        {"inputs": [4, 5], "prompt_name": "query"},
        "prompt_name='query' is not supported with token ids",
    ),
    ("/predict", {"inputs": ["a", "b", "c"]}, "inputs: expected a text, a pair [text, text], or a batch"),
]


def ask(service: Service, messages: list[dict[str, Any]], path: str = "/embed") -> Any:
    """Return the coroutine of one request by ASGI and the list that its answer goes to; after `messages` nothing comes."""
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    return service.app(scope, receive, send), sent


def gate_refuses(service: Callable[..., Service], patch: pytest.MonkeyPatch) -> list[int]:
    """Return the statuses of requests that do not pass the gate."""
    locked, small, closed = service(api_key="sesame"), service(max_body=100), service()
    patch.setattr(gate, "_DISCARDED", 1000)
    patch.setattr(gate, "_BODY_SECONDS", 0.05)
    closed.gate.close()
    small_client = TestClient(small.app)

    def late() -> int:
        request, sent = ask(service(), [{"type": "http.request", "body": b"{", "more_body": True}])
        asyncio.run(request)
        return int(sent[0]["status"])

    return [
        TestClient(locked.app).post("/embed", json={"inputs": "time"}).status_code,
        TestClient(closed.app).get("/health").status_code,
        small_client.post("/embed", content=b"a" * 500).status_code,  # read to its end
        small_client.post("/embed", content=b"a" * 5000).status_code,  # its length says it
        small_client.post("/embed", content=iter([b"a" * 5000])).status_code,  # it is not read to its end
        late(),
    ]


def stop_the_server(service: Service, patch: pytest.MonkeyPatch) -> None:
    """Cancel the task of a request whose model computes."""
    begun = asyncio.Event()

    async def rows(self: Encoder, encoded: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    async def scenario() -> None:
        request, _ = ask(
            service, [{"type": "http.request", "body": b'{"inputs": "time"}', "more_body": False}]
        )
        task = asyncio.ensure_future(request)
        await asyncio.wait_for(begun.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with patch.context() as inside:
        inside.setattr(Encoder, "rows", rows)
        asyncio.run(scenario())
