"""The metrics of `/metrics` for Prometheus, documented in docs/reference/server.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_cpu_accel.serve.batching import BatchFacts
from hf_cpu_accel.serve.language.model import LanguageModel
from hf_cpu_accel.serve.models import Models

PREFIX = "hf_cpu_accel"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Metrics:
    """The metrics of one server, separate from those of other servers in the process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, label: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", help, [label], registry=registry, buckets=buckets)

        def gauge(name: str, help: str, *labels: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", help, labels, registry=registry)

        self.requests = counter("requests", "Requests answered", "endpoint", "status")
        self.running = gauge("requests_running", "Requests that are being answered")
        self.seconds = histogram("request_seconds", "Seconds to the end of an answer", "endpoint", _SECONDS)
        self.first_token = histogram(
            "first_token_seconds", "Seconds to an answer's first token", "model", _SECONDS
        )
        self.tokens = counter("tokens", "Tokens read or written", "model", "kind")
        self.waiting = gauge("queue_length", "Requests or texts that wait for the model", "model")
        self.rows = gauge("rows_running", "Chats that the engine computes at this moment", "model")
        self.prefix_cache = gauge("prefix_cache_bytes", "Keys and values of earlier chats", "model")
        self.drafts = counter("draft_tokens", "Tokens drafted, and those accepted", "model", "kind")
        self._drafts: dict[tuple[str, str], int] = {}  # counted so far
        self.batch_rows = histogram("batch_rows", "Texts in a batch", "model", _ROWS)
        self.batch_tokens = histogram("batch_tokens", "Tokens in a batch, without padding", "model", _TOKENS)
        self.batch_seconds = histogram(
            "batch_seconds", "Seconds that a batch took the model", "model", _SECONDS
        )

    def on_batch(self, model: str) -> Callable[[BatchFacts], None]:
        """Return the callback `on_batch` of a `Batcher`."""
        rows, tokens, seconds = (
            histogram.labels(model) for histogram in (self.batch_rows, self.batch_tokens, self.batch_seconds)
        )
        read = self.tokens.labels(model, "prompt")

        def record(facts: BatchFacts) -> None:
            rows.observe(facts.rows)
            tokens.observe(facts.tokens)
            seconds.observe(facts.seconds)
            read.inc(facts.tokens)

        return record

    def text(self, models: Models) -> bytes:
        """Return all metrics in the Prometheus format, with the current state of `models`."""
        for served in models:
            self.waiting.labels(served.name).set(served.waiting)
            if isinstance(served, LanguageModel):
                now = served.engine.metrics
                self.rows.labels(served.name).set(now.running)
                self.prefix_cache.labels(served.name).set(now.prefix_cache_bytes)
                self._count_drafts(served.name, "drafted", now.speculation.drafted)
                self._count_drafts(served.name, "accepted", now.speculation.accepted)
        return generate_latest(self.registry)

    def _count_drafts(self, model: str, kind: str, total: int) -> None:
        self.drafts.labels(model, kind).inc(total - self._drafts.get((model, kind), 0))
        self._drafts[model, kind] = total


class MetricsMiddleware:
    """Count requests. Unknown paths count as one endpoint, so that clients cannot create many labels."""

    def __init__(self, app: ASGIApp, metrics: Metrics, endpoints: frozenset[str]) -> None:
        self.app, self.metrics, self.endpoints = app, metrics, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = "499"  # as in nginx: the client disconnected
        start = time.monotonic()

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        self.metrics.running.inc()
        try:
            await self.app(scope, receive, record_status)
        finally:
            self.metrics.running.dec()
            endpoint = scope["path"] if scope["path"] in self.endpoints else "other"
            self.metrics.requests.labels(endpoint, status).inc()
            self.metrics.seconds.labels(endpoint).observe(time.monotonic() - start)
