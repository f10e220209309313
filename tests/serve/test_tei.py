"""`/embed`, `/rerank` and `/predict`: text-embeddings-inference's shapes, with the numbers that transformers itself gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from tests.serve.conftest import LABELS
from tests.serve.tiny import WORDS

TEXTS = ["time year", "life", "state family student group child world", "unknown words here"]
TOO_LONG = " ".join(WORDS * 2)


def plain(folder: Path, *texts: Any, classifies: bool = False) -> np.ndarray:
    """What transformers gives, each text for itself: means of hidden states, or logits."""
    auto = AutoModelForSequenceClassification if classifies else AutoModel
    tokenizer, model = AutoTokenizer.from_pretrained(folder), auto.from_pretrained(folder).eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            inputs = tokenizer(
                *([text] if isinstance(text, str) else text), return_tensors="pt", truncation=True
            )
            output = model(**inputs)
            rows.append(output.logits[0] if classifies else output.last_hidden_state[0].mean(0))
    return torch.stack(rows).numpy()


def post(client: TestClient, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_embed_returns_a_row_per_text(client: TestClient, loaded: dict[str, Any]) -> None:
    expected = plain(loaded["folder"] / "embedder", *TEXTS)
    raw = np.array(post(client, "/embed", inputs=TEXTS, normalize=False))
    np.testing.assert_allclose(raw, expected, atol=2e-4, rtol=1e-3)
    normalized = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(post(client, "/embed", inputs=TEXTS), normalized, atol=2e-4)
    np.testing.assert_allclose(post(client, "/embed", inputs=TEXTS[0]), normalized[:1], atol=2e-4)
    short = expected[:, :5] / np.linalg.norm(expected[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose(post(client, "/embed", inputs=TEXTS, dimensions=5), short, atol=2e-4)


def test_embed_accepts_token_ids(client: TestClient) -> None:
    ids = [2, 4, 5, 3]  # [CLS] time year [SEP]
    by_text = post(client, "/embed", inputs=["time year"])
    for inputs in (ids, [ids]):
        np.testing.assert_allclose(post(client, "/embed", inputs=inputs), by_text, atol=1e-5)


@pytest.mark.parametrize("direction", ["Left", "Right"])
def test_embed_truncates_on_request(client: TestClient, direction: str) -> None:
    words = WORDS * 2
    kept = words[:22] if direction == "Right" else words[-22:]
    cut = post(client, "/embed", inputs=TOO_LONG, truncate=True, truncation_direction=direction)
    np.testing.assert_allclose(cut, post(client, "/embed", inputs=" ".join(kept)), atol=1e-5)


def test_rerank_orders_texts_by_score(client: TestClient, loaded: dict[str, Any]) -> None:
    logits = plain(loaded["folder"] / "ranker", *[("woman man", text) for text in TEXTS], classifies=True)[
        :, 0
    ]
    ranks = post(client, "/rerank", query="woman man", texts=TEXTS, return_text=True)
    order = np.argsort(-logits).tolist()
    assert [rank["index"] for rank in ranks] == order
    assert [rank["text"] for rank in ranks] == [TEXTS[index] for index in order]
    np.testing.assert_allclose([rank["score"] for rank in ranks], 1 / (1 + np.exp(-logits[order])), atol=1e-4)
    raw = post(client, "/rerank", query="woman man", texts=TEXTS, raw_scores=True)
    np.testing.assert_allclose([rank["score"] for rank in raw], logits[order], atol=1e-3)
    assert set(raw[0]) == {"index", "score"}


def test_predict_returns_labels_with_scores(client: TestClient, loaded: dict[str, Any]) -> None:
    body = {"model": "classifier"}
    logits = plain(loaded["folder"] / "classifier", "time year", ("life", "state"), classifies=True)
    expected = torch.tensor(logits).softmax(-1).numpy()
    one = post(client, "/predict", inputs="time year", **body)
    assert [label["label"] for label in one] == [LABELS[index] for index in np.argsort(-expected[0])]
    np.testing.assert_allclose([label["score"] for label in one], np.sort(expected[0])[::-1], atol=1e-4)
    pair = post(client, "/predict", inputs=["life", "state"], **body)
    batch = post(client, "/predict", inputs=[["time year"], ["life", "state"]], **body)
    for answer, alone in zip(batch, (one, pair), strict=True):
        assert [label["label"] for label in answer] == [label["label"] for label in alone]
        np.testing.assert_allclose([a["score"] for a in answer], [a["score"] for a in alone], atol=1e-5)
    raw = post(client, "/predict", inputs="time year", raw_scores=True, **body)
    np.testing.assert_allclose([label["score"] for label in raw], np.sort(logits[0])[::-1], atol=1e-3)


REFUSED: list[tuple[str, Any, int, str]] = [
    ("/embed", {"inputs": 5}, 422, "inputs: expected a text, a list of texts"),
    ("/embed", {"inputs": []}, 422, "inputs: expected a text"),
    ("/embed", {"inputs": ["a", 5]}, 422, "inputs: expected a text"),
    ("/embed", {"inputs": [True]}, 422, "inputs: expected a text"),
    ("/embed", {"inputs": ""}, 422, "inputs cannot be empty"),
    ("/embed", {"inputs": [10**9]}, 422, "inputs contains the token id 1000000000; accepted are 0 to 19"),
    ("/embed", {"inputs": [-1]}, 422, "inputs contains the token id -1; accepted are 0 to 19"),
    ("/embed", {}, 422, "inputs: Field required"),
    ("/embed", [], 422, "the body: Input should be a valid dictionary"),
    ("/embed", {"inputs": "a", "truncate": "yes"}, 422, "truncate: Input should be a valid boolean"),
    (
        "/embed",
        {"inputs": "a", "dimensions": -4},
        422,
        "dimensions: Input should be greater than or equal to 1",
    ),
    (
        "/embed",
        {"inputs": "a", "dimensions": 33},
        422,
        "dimensions=33 is not supported by this model; accepted are 1 to 32",
    ),
    ("/embed", {"inputs": "a", "temperature": 1}, 422, "temperature: Extra inputs are not permitted"),
    (
        "/embed",
        {"inputs": "a", "prompt_name": "query"},
        422,
        "prompt_name='query' is unknown; accepted: none",
    ),
    (
        "/embed",
        {"inputs": "a", "model": "other"},
        404,
        "model 'other' does not exist; this server has embedder, ",
    ),
    (
        "/embed",
        {"inputs": "a", "model": "ranker"},
        422,
        "model 'ranker' does not support embed; models that do: embedder",
    ),
    ("/embed", {"inputs": TOO_LONG}, 413, "inputs must have at most 24 tokens, given: 34"),
    ("/rerank", {"query": "a", "texts": []}, 422, "texts: List should have at least 1 item"),
    ("/rerank", {"query": "", "texts": ["a"]}, 422, "query: String should have at least 1 character"),
    ("/rerank", {"query": "a", "texts": "b"}, 422, "texts: Input should be a valid list"),
    ("/rerank", {"query": TOO_LONG, "texts": ["a"]}, 413, "inputs must have at most 24 tokens"),
    ("/predict", {"inputs": ["a", "b", "c"]}, 422, "inputs: expected a text, a pair"),
    ("/predict", {"inputs": [["a", "b", "c"]]}, 422, "inputs: expected a text, a pair"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED)
def test_wrong_requests_are_rejected(
    client: TestClient, path: str, body: Any, status: int, message: str
) -> None:
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["error_type"]) == (status, "Validation")
    assert message in response.json()["error"]


@pytest.mark.parametrize("body", [b"", b'{"inputs', b"\x80\x04K\x01.", b"[" * 100_000, b'{"inputs": NaN}'])
def test_bodies_that_are_not_json(client: TestClient, body: bytes) -> None:
    response = client.post("/embed", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 422)
    assert response.json()["error"]
    assert len(post(client, "/embed", inputs="time")[0]) == 32


def test_other_paths_and_methods(client: TestClient) -> None:
    assert client.post("/nothing", json={}).json() == {"error": "Not Found", "error_type": "Validation"}
    assert client.get("/embed").status_code == 405
