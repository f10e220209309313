"""Refusals: each field that only has neutral values, and each `raise` below serve/http, by requests to the application."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import reprlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from starlette.testclient import TestClient

from hf_cpu_accel.serve import http
from hf_cpu_accel.serve.encoders.encoder import Encoder
from hf_cpu_accel.serve.http import gate
from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.http.chat_schemas import ChatRequest
from hf_cpu_accel.serve.http.openai_schemas import CompletionRequest
from hf_cpu_accel.serve.http.transcription import TranscriptionForm
from hf_cpu_accel.serve.language.model import LanguageModel
from hf_cpu_accel.serve.models import Models
from hf_cpu_accel.serve.speech.transcriber import Transcriber
from tests.serve import sounds, tiny

FOLDER = Path(http.__file__).parent
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


@pytest.fixture(scope="module")
def service(
    loaded: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Service]]:
    """Builds services around one model of each kind; the embedder has a prompt."""
    embedder = dataclasses.replace(loaded["embedder"], prompts={"query": "time "})
    models = Models(
        [
            LanguageModel("writer", tiny.writer(), tiny.byte_tokenizer(), rows=2, waiting=4),
            Encoder(embedder),
            Encoder(loaded["ranker"]),
            Transcriber("ears", sounds.recogniser(tmp_path_factory.mktemp("speech"))),
        ]
    )
    yield lambda **options: Service(models, **options)
    for model in models:
        assert model.close(30)


@pytest.fixture
def client(service: Callable[..., Service]) -> TestClient:
    return TestClient(service().app, raise_server_exceptions=False)


def assert_openai_error(response: Any, parameter: str | None) -> str:
    """Return the message of an error of OpenAI's form with status 400."""
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", parameter)
    return str(error["message"])


def assert_names(message: str, field: str, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """The message has the field with its value, and what is accepted."""
    assert message.startswith(f"{field}=")
    accepted = f"accepted: {neutral[field][0]!r}" if neutral[field] else "leave it out"
    assert message.endswith(f" is not supported; {accepted}")
    assert len(message) < 300


TEXT_FIELDS = [(path, field) for path, (schema, _) in TEXT.items() for field in schema.neutral]


@pytest.mark.parametrize(("path", "field"), TEXT_FIELDS)
def test_each_unsupported_field_of_texts_is_refused(client: TestClient, path: str, field: str) -> None:
    schema, body = TEXT[path]
    for value in ASKING[field]:
        message = assert_openai_error(client.post(path, json={**body, field: value}), field)
        assert_names(message, field, schema.neutral)
        assert message.startswith(f"{field}={reprlib.repr(value)} ")
    for value in (*schema.neutral[field], None):
        response = client.post(path, json={**body, field: value})
        assert response.status_code == 200, response.text


def test_several_fields_are_named_at_once(client: TestClient) -> None:
    path, (_, body) = "/v1/chat/completions", TEXT["/v1/chat/completions"]
    response = client.post(path, json={**body, "n": 2, "audio": {"voice": "alloy"}})
    message = assert_openai_error(response, "n")
    assert (
        message
        == "n=2 is not supported; accepted: 1; audio={'voice': 'alloy'} is not supported; leave it out"
    )


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", "0.5"), ("prompt", "Words."), ("stream", "true")]
)
def test_each_unsupported_field_of_recordings_is_refused(client: TestClient, field: str, value: str) -> None:
    assert set(TranscriptionForm.neutral) == {"temperature", "prompt", "stream"}
    path = "/v1/audio/transcriptions"
    message = assert_openai_error(client.post(path, files=FILE, data={field: value}), field)
    assert_names(message, field, TranscriptionForm.neutral)
    neutral = str(TranscriptionForm.neutral[field][0]).lower()
    assert client.post(path, files=FILE, data={field: neutral}).status_code == 200


UNKNOWN: dict[str, dict[str, Any]] = {
    "/v1/completions": {"json": {"prompt": "a", "nonsense": 1}},
    "/v1/chat/completions": {"json": {"messages": CHAT, "nonsense": 1}},
    "/v1/embeddings": {"json": {"input": "a", "nonsense": 1}},
    "/v1/audio/transcriptions": {"files": FILE, "data": {"nonsense": "1"}},
    "/embed": {"json": {"inputs": "a", "nonsense": 1}},
    "/rerank": {"json": {"query": "a", "texts": ["b"], "nonsense": 1}},
    "/predict": {"json": {"inputs": "a", "nonsense": 1}},
}


@pytest.mark.parametrize("path", UNKNOWN)
def test_an_unknown_field_is_refused(client: TestClient, path: str) -> None:
    response = client.post(path, **UNKNOWN[path])
    if path.startswith("/v1/"):
        message = assert_openai_error(response, "nonsense")
    else:
        assert (response.status_code, response.json()["error_type"]) == (422, "Validation")
        message = response.json()["error"]
    assert message == "nonsense: Extra inputs are not permitted"


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
        "tool_choice='rain': there is no such tool in tools; accepted: 'auto', 'none', 'required', 'weather'",
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "tools": TOOLS, "response_format": {"type": "json_object"}},
        "response_format",
        "response_format with tools is not supported; accepted: tool_choice='none'",
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "response_format": {"type": "json_schema"}},
        "response_format",
        "json_schema is for the type 'json_schema'",
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
        "messages: tool_calls are not as OpenAI has them",
    ),
    ("/v1/embeddings", {"input": 5}, "input", "input: expected a text, a list of texts"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "; got 'int8'"),
]


@pytest.mark.parametrize(("path", "body", "parameter", "words"), WRONG)
def test_wrong_values_are_refused(
    client: TestClient, path: str, body: dict[str, Any], parameter: str | None, words: str
) -> None:
    assert words in assert_openai_error(client.post(path, json=body), parameter)


def test_an_unknown_language_is_refused(client: TestClient) -> None:
    response = client.post("/v1/audio/transcriptions", files=FILE, data={"language": "de"})
    message = assert_openai_error(response, "language")
    assert message == "language='de' is unknown; known: none, the model knows one language only"


TEI: list[tuple[str, dict[str, Any], str]] = [
    ("/embed", {"inputs": 5}, "inputs: expected a text, a list of texts"),
    ("/embed", {"inputs": "a", "prompt_name": "passage"}, "the model has no prompt 'passage'; known: query"),
    ("/embed", {"inputs": [4, 5], "prompt_name": "query"}, "a prompt can't be put before token ids"),
    ("/predict", {"inputs": ["a", "b", "c"]}, "inputs: expected a text, a pair [text, text], or a batch"),
]


@pytest.mark.parametrize(("path", "body", "words"), TEI)
def test_what_text_embeddings_inference_refuses(
    client: TestClient, path: str, body: dict[str, Any], words: str
) -> None:
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["error_type"]) == (422, "Validation")
    assert words in response.json()["error"]


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


def test_the_gate_refuses(service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch) -> None:
    assert gate_refuses(service, monkeypatch) == [401, 503, 413, 413, 413, 408]
    stop_the_server(service(), monkeypatch)


def raises_in(folder: Path) -> set[tuple[str, int]]:
    """Return (file, line) of each `raise`."""
    return {
        (str(file), node.lineno)
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise)
    }


@contextmanager
def lines_run(folder: Path) -> Iterator[set[tuple[str, int]]]:
    """Collect (file, line) of what runs in the files of `folder`, in this thread and those that are started inside."""
    lines: set[tuple[str, int]] = set()
    prefix = str(folder)

    def trace_call(frame: FrameType, event: str, argument: Any) -> Any:
        return trace_line if frame.f_code.co_filename.startswith(prefix) else None

    def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace_line

    before = sys.gettrace()
    threading.settrace(trace_call)
    sys.settrace(trace_call)
    try:
        yield lines
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]


def test_every_raise_of_the_endpoints_is_run(
    service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new `raise` below serve/http needs a request in this file that runs it."""
    with lines_run(FOLDER) as lines:
        client = TestClient(service().app, raise_server_exceptions=False)
        for path, body, *_ in (*WRONG, *TEI):
            assert client.post(path, json=body).status_code in (400, 422)
        path, (_, fields) = "/v1/chat/completions", TEXT["/v1/chat/completions"]
        assert client.post(path, json={**fields, "n": 2}).status_code == 400
        assert (
            client.post("/v1/completions", json={"prompt": ["a"] * 40, "max_tokens": 80}).status_code == 429
        )
        assert client.get("/v1/models/other").status_code == 404
        assert client.post("/v1/audio/transcriptions", files=FILE, data={"language": "de"}).status_code == 400
        gate_refuses(service, monkeypatch)
        stop_the_server(service(), monkeypatch)
    missed = raises_in(FOLDER) - lines
    assert len(raises_in(FOLDER)) > 15
    assert not missed, f"no test runs {sorted(missed)}"
