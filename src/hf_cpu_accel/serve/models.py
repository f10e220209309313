"""The models in service, found by the names that clients call them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from hf_cpu_accel.serve.limits import BadInput

# What a model can be asked for, and where.
ENDPOINTS = {
    "embed": ("/embed", "/v1/embeddings"),
    "predict": ("/predict",),
    "rerank": ("/rerank",),
    "generate": ("/v1/chat/completions", "/v1/completions"),
    "transcribe": ("/v1/audio/transcriptions",),
}


class UnknownModel(LookupError):
    """The server has no model of that name."""


class Served(Protocol):
    """One model in service. model: what was accelerated. capabilities: of `ENDPOINTS`."""

    name: str
    model: Any

    @property
    def capabilities(self) -> tuple[str, ...]: ...

    @property
    def waiting(self) -> int:
        """Requests or inputs in its queue."""
        ...

    def close(self, timeout: float | None = None) -> bool:
        """Finish what was begun, take nothing new; False if that took longer than `timeout` seconds."""
        ...


class Models:
    """All models of one server.

    Raises:
        ValueError: two have the same name.
    """

    def __init__(self, served: Sequence[Served]) -> None:
        self.created = int(time.time())
        self._served = {one.name: one for one in served}
        if len(self._served) < len(served):
            raise ValueError(f"models have to have different names: {', '.join(one.name for one in served)}")

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def find(self, name: str | None, capability: str) -> Any:
        """The model of that name, or without one the first that can do it.

        Raises:
            UnknownModel: there is none of that name.
            BadInput: it can't do it, or no model can.
        """
        able = [one for one in self if capability in one.capabilities]
        if name is None:
            if not able:
                raise BadInput(f"no model of this server is for {capability}")
            return able[0]
        if name not in self._served:
            raise UnknownModel(f"there is no model {name!r}; this server has {', '.join(self._served)}")
        if self._served[name] not in able:
            names = ", ".join(one.name for one in able) or "no model of this server"
            raise BadInput(f"the model {name!r} is not for {capability}; {names} is")
        return self._served[name]
