"""Each `raise` below serve/http is run by a request to the application."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from starlette.testclient import TestClient

from hf_cpu_accel.serve import http
from hf_cpu_accel.serve.http.app import Service
from tests.serve.refusals import FILE, TEI, TEXT, WRONG, gate_refuses, stop_the_server

FOLDER = Path(http.__file__).parent


def raises_in(folder: Path) -> set[tuple[str, int]]:
    """Return (file, line) of each `raise`."""
    return {
        (str(file), node.lineno)
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise)
    }


@contextmanager
def lines_run(folder: Path) -> Iterator[set[tuple[str, int]]]:
    """Collect (file, line) of what runs in the files of `folder`, in this thread and those that are started inside."""
    lines: set[tuple[str, int]] = set()
    prefix = str(folder)

    def trace_call(frame: FrameType, event: str, argument: Any) -> Any:
        return trace_line if frame.f_code.co_filename.startswith(prefix) else None

    def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace_line

    before = sys.gettrace()
    threading.settrace(trace_call)
    sys.settrace(trace_call)
    try:
        yield lines
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]


def test_every_raise_of_the_endpoints_is_run(
    full_service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new `raise` below serve/http needs a request in refusals.py, or here, that runs it."""
    with lines_run(FOLDER) as lines:
        client = TestClient(full_service().app, raise_server_exceptions=False)
        for path, body, *_ in (*WRONG, *TEI):
            assert client.post(path, json=body).status_code in (400, 422)
        path, (_, fields) = "/v1/chat/completions", TEXT["/v1/chat/completions"]
        assert client.post(path, json={**fields, "n": 2}).status_code == 400
        assert (
            client.post("/v1/completions", json={"prompt": ["a"] * 40, "max_tokens": 80}).status_code == 429
        )
        assert client.get("/v1/models/other").status_code == 404
        assert client.post("/v1/audio/transcriptions", files=FILE, data={"language": "de"}).status_code == 400
        gate_refuses(full_service, monkeypatch)
        stop_the_server(full_service(), monkeypatch)
    missed = raises_in(FOLDER) - lines
    assert len(raises_in(FOLDER)) > 15
    assert not missed, f"no test runs {sorted(missed)}"
