"""The server of `hf-cpu-accel serve` as a deployment of Ray Serve: `serve run serve.yaml`.

Each replica is a process with the whole server in it: OpenAI's endpoints and text-embeddings-inference's, answers streamed. Ray
starts and ends replicas with the load, and replaces those that die.
"""

from __future__ import annotations

from ray import serve
from ray.serve import Application
from replica import Arguments, service
from starlette.types import ASGIApp


@serve.ingress()
class ModelServer:
    """A replica. What cannot be loaded makes the deployment unhealthy; `serve status` and its log say why."""

    def __init__(self, arguments: Arguments) -> None:
        self._service = service(arguments)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Ray once the replica is there."""
        return self._service.app


def build(arguments: Arguments) -> Application:
    """What `import_path: serving:build` of serve.yaml names."""
    return serve.deployment(name="models", **arguments.options)(ModelServer).bind(arguments)
