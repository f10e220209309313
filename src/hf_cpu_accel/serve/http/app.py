"""The ASGI application: all endpoints behind the gate."""

from __future__ import annotations

from fastapi import FastAPI

from hf_cpu_accel.serve.http import chat, completions, errors, openai_embeddings, status, tei, transcription
from hf_cpu_accel.serve.http.gate import Gate
from hf_cpu_accel.serve.http.metrics import Metrics, MetricsMiddleware
from hf_cpu_accel.serve.models import ENDPOINTS, Models


class Service:
    """The server as an ASGI application, `app`.

    Args:
        models: the models to serve; the caller closes them.
        metrics: the metrics that the batchers of `models` write to; None creates new ones.
        api_key: see `Gate`.
        max_body: see `Gate`.
        max_upload: see `Gate`.
    """

    def __init__(
        self,
        models: Models,
        metrics: Metrics | None = None,
        *,
        api_key: str | None = None,
        max_body: int = 2 << 20,
        max_upload: int = 25 << 20,
    ) -> None:
        self.models = models
        self.metrics = metrics or Metrics()
        api = FastAPI(title="hf_cpu_accel", docs_url="/docs", redoc_url=None)
        errors.install(api)
        for module in (tei, openai_embeddings, transcription):
            api.include_router(module.router(models))
        for module_with_metrics in (chat, completions, status):
            api.include_router(module_with_metrics.router(models, self.metrics))
        self.gate = Gate(api, api_key=api_key, max_body=max_body, max_upload=max_upload)
        endpoints = {path for paths in ENDPOINTS.values() for path in paths}
        paths = frozenset({*endpoints, "/health", "/metrics", "/v1/models"})
        self.app = MetricsMiddleware(self.gate, self.metrics, paths)
