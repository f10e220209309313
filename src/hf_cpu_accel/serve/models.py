"""The models of a server, which requests find by name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from hf_cpu_accel.serve.limits import BadInput

# Capabilities of models, and their endpoints.
ENDPOINTS = {
    "embed": ("/embed", "/v1/embeddings"),
    "predict": ("/predict",),
    "rerank": ("/rerank",),
    "generate": ("/v1/chat/completions", "/v1/completions"),
    "transcribe": ("/v1/audio/transcriptions",),
}


class UnknownModel(LookupError):
    """The server has no model with this name."""


class Served(Protocol):
    """A model of the server. `model` is the accelerated object; `capabilities` are keys of `ENDPOINTS`."""

    name: str
    model: Any

    @property
    def capabilities(self) -> tuple[str, ...]: ...

    @property
    def waiting(self) -> int:
        """Return the number of requests or inputs in the queue."""
        ...

    def close(self, timeout: float | None = None) -> bool:
        """Reject new requests and finish running ones; return False if that takes longer than `timeout` seconds."""
        ...


class Models:
    """All models of one server.

    Raises:
        ValueError: two models have the same name.
    """

    def __init__(self, served: Sequence[Served]) -> None:
        self.created = int(time.time())
        self._served = {one.name: one for one in served}
        if len(self._served) < len(served):
            raise ValueError(
                f"the names of models must differ, got {', '.join(one.name for one in served)}; rename one with NAME=MODEL"
            )

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def find(self, name: str | None, capability: str) -> Any:
        """Return the model with this name, or for None the first model with the capability.

        Raises:
            UnknownModel: no model has this name.
            BadInput: the model, or for None each model, lacks the capability.
        """
        capable = [one for one in self if capability in one.capabilities]
        if name is None:
            if not capable:
                raise BadInput(f"no model of this server supports {capability}; start the server with one")
            return capable[0]
        if name not in self._served:
            raise UnknownModel(f"model {name!r} does not exist; this server has {', '.join(self._served)}")
        if self._served[name] not in capable:
            names = ", ".join(one.name for one in capable) or "none of this server"
            raise BadInput(f"model {name!r} does not support {capability}; models that do: {names}")
        return self._served[name]
