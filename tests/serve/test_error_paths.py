"""Errors behind the endpoints that no other test runs: each is an answer in words, and the server goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from hf_cpu_accel.serve.encoders import loading
from hf_cpu_accel.serve.encoders.encoder import Encoder
from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.language.grammar import Grammars
from hf_cpu_accel.serve.language.model import LanguageModel
from hf_cpu_accel.serve.language.text import TextStream
from hf_cpu_accel.serve.limits import BadInput
from hf_cpu_accel.serve.models import Models, Served
from hf_cpu_accel.serve.speech import audio
from tests.serve import sounds, tiny

PICKY = "{% if messages[0].role == 'assistant' %}{{ raise_exception('users speak first') }}{% endif %}a:"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """Of a server whose chat template refuses some chats."""
    model = LanguageModel("picky", tiny.writer(), tiny.byte_tokenizer(PICKY), rows=1, waiting=4)
    yield TestClient(Service(Models([model])).app, raise_server_exceptions=False)
    assert model.close(30)


def ask(client: TestClient) -> Any:
    return client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})


def test_messages_that_a_template_rejects(client: TestClient) -> None:
    body = {"messages": [{"role": "assistant", "content": "hello"}], "max_tokens": 1}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message == "the chat template of 'picky' rejects these messages: users speak first"


def test_errors_while_text_is_generated(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(self: TextStream, token: int) -> Any:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(TextStream, "feed", feed)
        response = ask(client)
    assert response.status_code == 500
    expected = {"message": "RuntimeError: out of luck", "type": "server_error", "param": None, "code": None}
    assert response.json() == {"error": expected}
    assert ask(client).status_code == 200


def test_servers_without_a_capable_model(encoders: Callable[..., list[Served]]) -> None:
    response = ask(TestClient(Service(Models(encoders("embedder"))).app))
    assert response.status_code == 400
    assert (
        response.json()["error"]["message"]
        == "no model of this server supports generate; start the server with one"
    )


def test_two_models_of_one_name(loaded: dict[str, Any]) -> None:
    twins = [Encoder(loaded["embedder"]) for _ in range(2)]
    with pytest.raises(ValueError, match="the names of models must differ, got embedder, embedder"):
        Models(twins)
    for twin in twins:
        assert twin.close(30)


def test_a_model_of_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="some/model is a model of sentence-transformers, which is not installed"
    ):
        loading.load_sentence_transformer("name", "some/model")


def test_tokenizers_without_grammar_support() -> None:
    with pytest.raises(BadInput, match="JSON output is not supported with the tokenizer of this model: "):
        Grammars(object(), [0]).json({"type": "object"})


def test_a_token_that_the_grammar_forbids() -> None:
    """Such as one that another processor of logits has forced."""
    tokenizer = tiny.byte_tokenizer()
    mask = Grammars(tokenizer, [0]).json({"enum": [1, 12]})
    ids, forced = torch.tensor([[5, 6]]), torch.tensor([tokenizer("x")["input_ids"]])
    mask(ids, torch.zeros(1, 94))
    with pytest.raises(RuntimeError, match="the grammar of the answer failed: "):
        mask(torch.cat([ids, forced], dim=1), torch.zeros(1, 94))


def test_recordings_that_a_decoder_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_audio(*args: Any, **options: Any) -> np.ndarray:
        raise RuntimeError("no such codec")

    monkeypatch.setattr(audio, "is_torchcodec_available", lambda: True)
    monkeypatch.setattr(audio, "load_audio", load_audio)
    with pytest.raises(BadInput, match="file: the audio cannot be decoded: no such codec"):
        audio.samples(sounds.wav(sounds.tone()), sounds.RATE)
