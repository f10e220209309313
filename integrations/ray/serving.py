"""The server of `hf-cpu-accel serve` as a deployment of Ray Serve: `serve run serve.yaml`.

Each replica is a process that runs the complete server, including streaming. Ray starts and stops replicas with the load, and
replaces replicas that die.
"""

from __future__ import annotations

from ray import serve
from ray.serve import Application
from replica import Arguments, service
from starlette.types import ASGIApp


@serve.ingress()
class ModelServer:
    """A replica. A model that cannot be loaded makes the deployment unhealthy; `serve status` and its log show the reason."""

    def __init__(self, arguments: Arguments) -> None:
        self._service = service(arguments)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the ASGI app; Ray calls this after the replica is created."""
        return self._service.app


def build(arguments: Arguments) -> Application:
    """Return the application; `import_path: serving:build` in serve.yaml names this function."""
    return serve.deployment(name="models", **arguments.options)(ModelServer).bind(arguments)
