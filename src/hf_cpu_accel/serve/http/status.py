"""`/health`, `/metrics` and `/v1/models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from hf_cpu_accel.serve.http.metrics import Metrics
from hf_cpu_accel.serve.models import Models, Served, UnknownModel


def router(models: Models, metrics: Metrics) -> APIRouter:
    """Return the endpoints for `models`."""
    routes = APIRouter()

    def describe(served: Served) -> dict[str, Any]:
        owner = _owner(served.name)
        return {"id": served.name, "object": "model", "created": models.created, "owned_by": owner}

    @routes.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/metrics")
    async def metrics_text() -> Response:
        return Response(metrics.text(models), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [describe(served) for served in models]}

    @routes.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        for served in models:
            if served.name == name:
                return describe(served)
        raise UnknownModel(
            f"model {name!r} does not exist; this server has {', '.join(served.name for served in models)}"
        )

    return routes


def _owner(name: str) -> str:
    """Return the organization of a Hub model, as in `transformers serve`; "local" for a folder."""
    return "local" if Path(name).exists() else name.partition("/")[0] if "/" in name else ""
