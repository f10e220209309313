"""Refusals: each field that only has neutral values, and each `raise` below serve/http, by requests to the application."""

from __future__ import annotations

import json
import reprlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from starlette.testclient import TestClient

from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.http.transcription import TranscriptionForm
from hf_cpu_accel.serve.language.model import LanguageModel
from tests.serve.refusals import ASKING, CHAT, FILE, TEI, TEXT, WRONG, gate_refuses, stop_the_server


@pytest.fixture
def client(full_service: Callable[..., Service]) -> TestClient:
    return TestClient(full_service().app, raise_server_exceptions=False)


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
def test_unsupported_fields_of_text_requests_are_rejected(client: TestClient, path: str, field: str) -> None:
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
def test_unsupported_fields_of_transcriptions_are_rejected(
    client: TestClient, field: str, value: str
) -> None:
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
def test_unknown_fields_are_rejected(client: TestClient, path: str) -> None:
    response = client.post(path, **UNKNOWN[path])
    if path.startswith("/v1/"):
        message = assert_openai_error(response, "nonsense")
    else:
        assert (response.status_code, response.json()["error_type"]) == (422, "Validation")
        message = response.json()["error"]
    assert message == "nonsense: Extra inputs are not permitted"


@pytest.mark.parametrize(("path", "body", "parameter", "words"), WRONG)
def test_wrong_values_are_rejected(
    client: TestClient, path: str, body: dict[str, Any], parameter: str | None, words: str
) -> None:
    assert words in assert_openai_error(client.post(path, json=body), parameter)


def test_unknown_languages_are_rejected(client: TestClient) -> None:
    response = client.post("/v1/audio/transcriptions", files=FILE, data={"language": "de"})
    message = assert_openai_error(response, "language")
    assert message == "language='de' is unknown; accepted: none, the model has only one language"


@pytest.mark.parametrize(("path", "body", "words"), TEI)
def test_wrong_values_of_text_embeddings_inference_are_rejected(
    client: TestClient, path: str, body: dict[str, Any], words: str
) -> None:
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["error_type"]) == (422, "Validation")
    assert words in response.json()["error"]


@pytest.mark.parametrize("path", TEXT)
def test_errors_in_a_stream_have_the_format_of_openai(
    client: TestClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pieces(self: LanguageModel, generation: Any, text: Any) -> AsyncIterator[str]:
        yield "be"
        raise RuntimeError("out of luck")

    monkeypatch.setattr(LanguageModel, "pieces", pieces)
    events = client.post(path, json={**TEXT[path][1], "stream": True}).text.split("\n\n")
    expected = {"message": "RuntimeError: out of luck", "type": "server_error", "param": None, "code": None}
    assert json.loads(events[-2].removeprefix("data: ")) == {"error": expected}
    assert events[-1] == ""  # and no [DONE]


def test_the_gate_rejects(full_service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch) -> None:
    assert gate_refuses(full_service, monkeypatch) == [401, 503, 413, 413, 413, 408]
    stop_the_server(full_service(), monkeypatch)
