"""Clients that leave: wherever their answer is by then, it is not gone on with."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hf_cpu_accel.serve.engine import Metrics
from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.language.model import LanguageModel
from hf_cpu_accel.serve.models import Models
from tests.serve import tiny

PROMPT, LIMIT = "hello" * 20, 3000
PATHS = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}


@pytest.fixture(scope="module")
def writer() -> Iterator[LanguageModel]:
    """One row, so that a second client waits; prompts are computed in several chunks."""
    model = LanguageModel(
        "writer",
        tiny.writer(positions=4096, end=None),
        tiny.byte_tokenizer(),
        rows=1,
        prefill_chunk=32,
        prefix_cache_bytes=0,
    )
    yield model
    assert model.close(30)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def ended(writer: LanguageModel) -> int:
    metrics = writer.engine.metrics
    return metrics.completed + metrics.cancelled + metrics.failed


def ask_and_leave(
    writer: LanguageModel,
    path: str,
    stream: bool,
    *,
    at: int | None = None,
    when: Callable[[], bool] | None = None,
    then: Callable[[], object] = lambda: None,
) -> Metrics:
    """Ask for 3,000 tokens, and leave instead of taking the message number `at` of the answer, or once `when` is true.

    Args:
        then: is called when the server knows that the client has left.

    Returns:
        What the engine has counted meanwhile.
    """
    body = json.dumps({"max_tokens": LIMIT, "temperature": 0, "stream": stream, **PATHS[path]}).encode()
    before = writer.engine.metrics

    async def talk() -> None:
        left, asked, sent = asyncio.Event(), [body], 0

        async def receive() -> dict[str, Any]:
            if asked:
                return {"type": "http.request", "body": asked.pop(), "more_body": False}
            while when is not None and not when():
                await asyncio.sleep(0.005)
            if when is None:
                await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal sent
            if sent == at:
                left.set()
                await asyncio.Event().wait()  # nobody reads what the socket is full of
            sent += 1

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        await asyncio.wait_for(Service(Models([writer])).app(scope, receive, send), 60)

    asyncio.run(talk())
    then()
    wait_until(lambda: ended(writer) == writer.engine.metrics.requests)
    after = writer.engine.metrics
    return Metrics(
        cancelled=after.cancelled - before.cancelled,
        completed=after.completed - before.completed,
        generated_tokens=after.generated_tokens - before.generated_tokens,
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("at", [0, 1, 2, 5], ids=["status", "first chunk", "first token", "midway"])
def test_a_stream_ends_where_its_client_left(writer: LanguageModel, path: str, at: int) -> None:
    counted = ask_and_leave(writer, path, True, at=at)
    assert (counted.cancelled, counted.completed) == (1, 0)
    assert counted.generated_tokens < LIMIT


class Gate:
    """Keeps the engine before a chunk of a prompt: the first of the next request is number 0."""

    def __init__(self, writer: LanguageModel, chunk: int) -> None:
        self.scheduler: Any = writer.engine._scheduler
        self.chunk, self.calls = chunk, 0
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any) -> int:
        if self.calls == self.chunk:
            self.reached.set()
            assert self.go.wait(60)
        self.calls += 1
        found: int = type(self.scheduler)._prefill_chunk(self.scheduler, *arguments)
        return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_prompt_is_not_computed_to_its_end(
    writer: LanguageModel, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(writer, chunk=1)
    monkeypatch.setattr(writer.engine._scheduler, "_prefill_chunk", gate)

    def then() -> None:
        assert writer.engine.metrics.running == 1
        gate.go.set()

    counted = ask_and_leave(writer, path, stream, when=gate.reached.is_set, then=then)
    assert (counted.cancelled, counted.completed, counted.generated_tokens) == (1, 0, 0)
    assert gate.calls == 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_cancelled_requests_leave_the_queue(
    writer: LanguageModel, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(writer, chunk=0)
    monkeypatch.setattr(writer.engine._scheduler, "_prefill_chunk", gate)
    first = writer.engine.submit([1, 2, 3], max_new_tokens=2)
    assert gate.reached.wait(60)
    counted = ask_and_leave(writer, path, stream, when=lambda: writer.waiting == 1, then=gate.go.set)
    assert (counted.cancelled, counted.completed, counted.generated_tokens) == (1, 1, 2)
    assert len(first.result(60)) == 2
    assert gate.calls == 1
