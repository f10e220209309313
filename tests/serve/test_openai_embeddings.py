"""`/v1/embeddings` and `/v1/models` through OpenAI's own client, and the metrics that are left of it."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from tests.serve.tiny import WORDS


@pytest.fixture
def ai(client: TestClient) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client, max_retries=0)  # type: ignore[arg-type]


def test_floats_and_base64_equal_embed(ai: openai.OpenAI, client: TestClient) -> None:
    texts = ["time year", "life"]
    expected = client.post("/embed", json={"inputs": texts}).json()
    by_default = ai.embeddings.create(model="embedder", input=texts)  # base64, which the client decodes
    as_numbers = ai.embeddings.create(model="embedder", input=texts, encoding_format="float")
    for answer in (by_default, as_numbers):
        np.testing.assert_allclose([one.embedding for one in answer.data], expected, atol=1e-6)
        assert [one.index for one in answer.data] == [0, 1]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 4 + 3
        assert answer.model == "embedder"
    raw = client.post("/v1/embeddings", json={"input": "life", "encoding_format": "base64"}).json()
    decoded = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(decoded, expected[1], atol=1e-6)


def test_fewer_dimensions_are_normalized_again(ai: openai.OpenAI) -> None:
    whole = np.array(ai.embeddings.create(model="embedder", input="time").data[0].embedding)
    short = np.array(ai.embeddings.create(model="embedder", input="time", dimensions=7).data[0].embedding)
    np.testing.assert_allclose(short, whole[:7] / np.linalg.norm(whole[:7]), atol=1e-6)


def test_token_ids(ai: openai.OpenAI) -> None:
    by_text = ai.embeddings.create(model="embedder", input="time").data[0].embedding
    for ids in ([2, 4, 3], [[2, 4, 3]]):
        by_ids = ai.embeddings.create(model="embedder", input=ids).data[0].embedding
        np.testing.assert_allclose(by_ids, by_text, atol=1e-6)


def test_long_texts_are_rejected_or_cut(ai: openai.OpenAI) -> None:
    text = " ".join(WORDS * 2)
    with pytest.raises(openai.APIStatusError, match="at most 24 tokens") as caught:
        ai.embeddings.create(model="embedder", input=text)
    assert (caught.value.status_code, caught.value.code) == (413, "context_length_exceeded")
    cut = ai.embeddings.create(model="embedder", input=text, extra_body={"truncate": True})
    assert cut.usage.prompt_tokens == 24


def test_errors_have_the_format_of_openai(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'other' does not exist") as missing:
        ai.embeddings.create(model="other", input="time")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="input: expected a text") as wrong:
        ai.embeddings.create(model="embedder", input=[])
    assert (wrong.value.param, wrong.value.type) == ("input", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="'ranker' does not support embed"):
        ai.embeddings.create(model="ranker", input="time")


def test_models_are_listed(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == ["embedder", "classifier", "ranker"]
    assert ai.models.retrieve("ranker").object == "model"
    with pytest.raises(openai.NotFoundError):
        ai.models.retrieve("other")


def test_metrics_count_requests_and_tokens(client: TestClient) -> None:
    client.post("/embed", json={"inputs": ["time year", "life"]})
    client.post("/embed", json={"inputs": 5})
    client.post("/" + "x" * 50)
    found: dict[str, Any] = {}
    for line in client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name.removeprefix("hf_cpu_accel_")] = float(value)
    assert found['requests_total{endpoint="/embed",status="200"}'] == 1
    assert found['requests_total{endpoint="/embed",status="422"}'] == 1
    assert found['requests_total{endpoint="other",status="404"}'] == 1
    assert found['request_seconds_count{endpoint="/embed"}'] == 2
    assert found['tokens_total{kind="prompt",model="embedder"}'] == 4 + 3
    assert found['batch_rows_sum{model="embedder"}'] == 2
    assert found['queue_length{model="embedder"}'] == 0
    assert found["requests_running"] == 1  # this one
    assert client.get("/health").json() == {"status": "ok"}
