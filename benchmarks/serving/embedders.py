"""Servers of embeddings: ours, and rivals whose environments `python -m benchmarks.peers.setup openvino-server infinity` makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.peers import setup
from benchmarks.peers.registry import SERVERS
from benchmarks.serving.clients import written
from benchmarks.serving.process import command, free_port, server

_SERVED = "minilm"


@dataclass(frozen=True)
class Embedder:
    """A server of one model, and its request for the vector of a text.

    words: The command; None is replaced by a port to listen on. A server without it prints its own port.
    """

    name: str
    words: tuple[str | None, ...]
    path: str = "/embed"
    argument: str = "inputs"
    beside: Mapping[str, str] = field(default_factory=dict)

    def request(self, text: str) -> bytes:
        """Return the bytes of a request."""
        return written(self.path, {self.argument: text, **self.beside})

    @contextmanager
    def running(self) -> Iterator[tuple[int, psutil.Process]]:
        """Run the server; yield its port and its process."""
        port = free_port() if None in self.words else None
        with server([str(port) if word is None else word for word in self.words], port) as found:
            yield found

    @property
    def counts_batches(self) -> bool:
        """Return whether its /metrics counts rows and batches, as this project's server does."""
        return None not in self.words


def ours(model: Path, dtype: str, threads: int | None) -> Embedder:
    """Return `hf-cpu-accel serve` as a system."""
    return Embedder(f"hf_cpu_accel {dtype}", tuple(command(str(model), dtype=dtype, threads=threads)))


def rival(name: str, model: Path, threads: int | None) -> Embedder:
    """Return a server of `registry.SERVERS`, in int8.

    Raises:
        RuntimeError: Its environment is missing; the message has the command that creates it.
    """
    environment = SERVERS[name]
    if reason := setup.missing(environment):
        raise RuntimeError(f"{name} {reason}")
    python = str(setup.python(environment))
    if name == "openvino":
        chosen = [] if threads is None else ["--threads", str(threads)]
        module = "benchmarks.serving.openvino_server"
        return Embedder("openvino int8", (python, "-m", module, str(model), *chosen))
    # Its int8 is torch's dynamic quantization. `--no-bettertransformer`: optimum's is of a transformers of the past.
    words = (
        *(str(Path(python).with_name("infinity_emb")), "v2", "--model-id", str(model)),
        *("--served-model-name", _SERVED, "--engine", "torch", "--device", "cpu", "--dtype", "int8"),
        *("--no-bettertransformer", "--host", "127.0.0.1", "--port", None),
    )
    return Embedder("infinity int8", words, "/embeddings", "input", {"model": _SERVED})
