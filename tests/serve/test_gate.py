"""Who gets in, with what, and what happens when the server is full, is stopping, or the client leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from hf_cpu_accel.serve.encoders import encoder as encoders_module
from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.models import Models, Served


@pytest.fixture
def service(encoders: Callable[..., list[Served]]) -> Callable[..., Service]:
    return lambda **options: Service(Models(encoders("embedder", max_waiting=3, max_wait=0)), **options)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The model computes until the first event is set; the second tells that it has begun."""
    free, begun = threading.Event(), threading.Event()

    def compute(loaded: Any, batch: Any) -> list[Any]:
        begun.set()
        assert free.wait(30)
        return [np.ones(32, dtype=np.float32)] * len(batch)

    monkeypatch.setattr(encoders_module, "compute", compute)
    yield free, begun
    free.set()


def test_the_key_opens(service: Callable[..., Service]) -> None:
    client = TestClient(service(api_key="sesame").app)
    for header in (
        {},
        {"authorization": "Bearer sesam"},
        {"authorization": "sesame"},
        {"authorization": "Basic sesame"},
    ):
        response = client.post("/embed", json={"inputs": "time"}, headers=header)
        assert response.status_code == 401
        assert "Authorization: Bearer KEY" in response.json()["error"]
        assert response.headers["www-authenticate"] == "Bearer"
    opened = client.post("/embed", json={"inputs": "time"}, headers={"authorization": "bearer sesame"})
    assert opened.status_code == 200
    assert client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_not_read_to_their_end(service: Callable[..., Service], chunked: bool) -> None:
    client = TestClient(service(max_body=1000).app)
    body: Any = b'{"inputs": "' + b"a" * 10_000_000 + b'"}'
    response = client.post("/embed", content=iter([body[:600], body[600:]]) if chunked else body)
    assert response.status_code == 413
    assert response.json() == {
        "error": "the body is too large; at most 1000 bytes are accepted",
        "error_type": "Validation",
    }
    assert client.post("/embed", json={"inputs": "time"}).status_code == 200


@pytest.mark.parametrize("length", ["9" * 5000, "-5", "many"])
def test_malicious_content_lengths(service: Callable[..., Service], length: str) -> None:
    client = TestClient(service(max_body=1000).app)
    response = client.post(
        "/embed",
        content=b'{"inputs": "time"}',
        headers={"content-length": length, "content-type": "application/json"},
    )
    assert response.status_code in (200, 413)


def test_full_queues_answer_429(
    service: Callable[..., Service], busy: tuple[threading.Event, threading.Event]
) -> None:
    made = service()
    client = TestClient(made.app)
    free, begun = busy
    answers: list[int] = []

    def ask(inputs: Any) -> None:
        answers.append(client.post("/embed", json={"inputs": inputs}).status_code)

    first = threading.Thread(target=ask, args=["time"])
    first.start()
    assert begun.wait(30)
    [encoder] = list(made.models)
    second = threading.Thread(target=ask, args=[["time"] * 3])
    second.start()
    while encoder.waiting < 3:
        pass
    refused = client.post("/embed", json={"inputs": "time"})
    assert refused.status_code == 429
    assert refused.json() == {
        "error": "the queue has no room for 1 inputs: 3 are waiting, at most 3 may; try again later",
        "error_type": "Overloaded",
    }
    assert refused.headers["retry-after"] == "1"
    refused = client.post("/v1/embeddings", json={"input": "time"})
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert client.post("/embed", json={"inputs": ["time"] * 4}).status_code == 413  # it never fits
    free.set()
    first.join(30)
    second.join(30)
    assert answers == [200, 200]


def test_errors_of_the_model_are_reported(
    service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(loaded: Any, batch: Any) -> Any:
        raise RuntimeError("out of luck")

    client = TestClient(service().app, raise_server_exceptions=False)
    with monkeypatch.context() as patch:
        patch.setattr(encoders_module, "compute", broken)
        response = client.post("/embed", json={"inputs": "time"})
        assert (response.status_code, response.json()["error_type"]) == (500, "Backend")
        assert "out of luck" in response.json()["error"]
    assert client.post("/embed", json={"inputs": "time"}).status_code == 200


def test_closed_gates_reject_all_requests(service: Callable[..., Service]) -> None:
    made = service()
    made.gate.close()
    client = TestClient(made.app)
    for path in ("/health", "/embed"):
        response = client.get(path)
        assert response.status_code == 503
        assert response.json() == {
            "error": "the server is stopping; try again later",
            "error_type": "Unhealthy",
        }


def test_disconnected_clients_leave_the_queue(
    service: Callable[..., Service], busy: tuple[threading.Event, threading.Event]
) -> None:
    made = service()
    free, begun = busy
    [encoder] = list(made.models)

    async def scenario() -> None:
        working, _ = _request(made, leaves=asyncio.Event())
        await asyncio.to_thread(begun.wait, 30)
        leaves = asyncio.Event()
        leaving, sent = _request(made, leaves=leaves)
        while encoder.waiting < 1:
            await asyncio.sleep(0.001)
        leaves.set()
        await asyncio.wait_for(leaving, 30)
        assert sent == []
        assert all(waiting.future.cancelled() for waiting in encoder.batcher._waiting)  # type: ignore[attr-defined]
        assert made.gate.running == 1
        free.set()
        await asyncio.wait_for(working, 30)

    asyncio.run(scenario())
    assert made.gate.running == 0


def _request(service: Service, leaves: asyncio.Event) -> tuple[asyncio.Future[None], list[Any]]:
    """One request to `/embed` by ASGI, of a client that leaves when told to."""
    body = [{"type": "http.request", "body": b'{"inputs": "time"}', "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if body:
            return body.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/embed",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    return asyncio.ensure_future(service.app(scope, receive, send)), sent
