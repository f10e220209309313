"""The example service under requests that mean no good: each gets an answer, and the next one too."""

from __future__ import annotations

import http.client
import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "embedding_service.py"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    spec = importlib.util.spec_from_file_location("embedding_service", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    service = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(service)
    model = SimpleNamespace(encode=lambda texts, **options: np.ones((len(texts), 2)))
    with ThreadingHTTPServer(("127.0.0.1", 0), service.make_handler(model)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def post(port: int, body: bytes, length: str) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.putrequest("POST", "/embed")
    connection.putheader("Content-Length", length)
    connection.endheaders(body)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


@pytest.mark.parametrize(
    ("body", "length", "status"),
    [
        (b"", "-1", 413),
        (b"", "9" * 5000, 413),
        (b"", str(1 << 21), 413),
        (b"", "many", 413),
        (b"", "0", 400),
        (b"\x80\x04K\x01.", "5", 400),
        (b"[" * 100_000, "100000", 400),
        (b'{"texts": "one"}', "16", 400),
        (b'{"texts": [1]}', "14", 400),
    ],
)
def test_bad_requests_are_answered(port: int, body: bytes, length: str, status: int) -> None:
    assert post(port, body, length)[0] == status
    good = json.dumps({"texts": ["a", "b"]}).encode()
    assert post(port, good, str(len(good))) == (200, {"embeddings": [[1.0, 1.0], [1.0, 1.0]]})
