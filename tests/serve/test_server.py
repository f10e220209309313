"""The server as a process: what it prints, 1,000 idle connections, bad HTTP, and an end that loses nothing."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve import tiny

IDLE = 1000


class Process:
    """`hf-cpu-accel serve` on a free port."""

    def __init__(self, *arguments: str) -> None:
        code = "from hf_cpu_accel.cli.main import app; app()"
        command = [
            sys.executable,
            "-c",
            code,
            "serve",
            *arguments,
            "--port",
            "0",
            "--threads",
            "1",
            "--dtype",
            "float32",
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        self.child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.said = ""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.said += line
            if line.startswith("http://"):
                break
        else:
            raise AssertionError(self.child.communicate()[1])
        self.port = int(line.split(" ")[0].rsplit(":", 1)[1])

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())

    def raw(self, data: bytes) -> bytes:
        """What a socket gets that sends these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as connection:
            connection.sendall(data)
            return connection.recv(1 << 16)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("served")
    tiny.save_embedder(folder / "embedder")
    tiny.writer(positions=4096, end=None).save_pretrained(folder / "writer")
    tiny.byte_tokenizer().save_pretrained(folder / "writer")
    process = Process(f"embed={folder / 'embedder'}", f"write={folder / 'writer'}")
    yield process
    process.child.kill()
    process.child.communicate()


def test_the_command_prints_the_models(process: Process) -> None:
    lines = process.said.splitlines()
    assert any("embed" in line and "/embed /v1/embeddings" in line and "float32" in line for line in lines)
    assert any("write" in line and "/v1/chat/completions /v1/completions" in line for line in lines)
    assert "without an API key" in lines[-1]
    assert len(process.post("/embed", inputs=["time", "year life"])) == 2


@pytest.mark.parametrize(
    ("request_", "answers"),
    [
        (b"nonsense\r\n\r\n", (b"HTTP/1.1 400",)),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000, (b"HTTP/1.1 400", b"HTTP/1.1 431")),
        (b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", (b"HTTP/1.1 400",)),
        (
            b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
            (b"HTTP/1.1 4",),
        ),
        (b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 900000000\r\n\r\n", (b"HTTP/1.1 413",)),
        (b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 7\r\n\r\n[[[[[[[", (b"HTTP/1.1 4",)),
    ],
)
def test_bad_http_gets_400(process: Process, request_: bytes, answers: tuple[bytes, ...]) -> None:
    assert process.raw(request_).startswith(answers)
    assert len(process.post("/embed", inputs="time")) == 1


def test_large_bodies_are_rejected(process: Process) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        process.post("/embed", inputs="a" * 10_000_000)
    assert caught.value.code == 413
    assert (
        json.loads(caught.value.read())["error"]
        == "the body is too large; at most 2000000 bytes are accepted"
    )


def test_idle_connections_do_not_block_requests(process: Process) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, IDLE + 500)), hard))
    idle = [socket.create_connection(("127.0.0.1", process.port), timeout=120) for _ in range(IDLE)]
    try:
        assert len(process.post("/embed", inputs=["time", "life"])) == 2
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(process.post("/embed", inputs="time")) == 1


def test_disconnected_clients_cancel_their_answers(process: Process) -> None:
    body = json.dumps({"model": "write", "prompt": "hello", "max_tokens": 4000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    process.raw(head.encode() + body)  # it leaves after the first tokens
    metrics = ""
    for _ in range(600):
        with urllib.request.urlopen(f"http://127.0.0.1:{process.port}/metrics", timeout=120) as answer:
            metrics = answer.read().decode()
        if "hf_cpu_accel_requests_running 1.0" in metrics:
            break
        time.sleep(0.05)
    assert "hf_cpu_accel_requests_running 1.0" in metrics  # this one alone
    assert 'generated",model="write"} 4000.0' not in metrics


def test_sigterm_finishes_running_requests(process: Process) -> None:
    """The last test of this process."""
    answers: list[Any] = []

    def write() -> None:
        answers.append(process.post("/v1/completions", model="write", prompt="hello", max_tokens=250))

    thread = threading.Thread(target=write)
    thread.start()
    with socket.create_connection(("127.0.0.1", process.port), timeout=120) as kept:
        _wait_until_running(process)
        process.child.send_signal(signal.SIGTERM)
        status = b""
        while not status.startswith(b"HTTP/1.1 503"):
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            status = kept.recv(1 << 16)
            assert status  # it is still there
    thread.join(120)
    assert answers[0]["usage"]["completion_tokens"] == 250
    assert process.child.wait(60) == 0


def _wait_until_running(process: Process) -> None:
    for _ in range(600):
        with urllib.request.urlopen(f"http://127.0.0.1:{process.port}/metrics", timeout=120) as answer:
            if b"hf_cpu_accel_requests_running 2.0" in answer.read():
                return
        time.sleep(0.01)
    raise AssertionError("the request does not run")


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from hf_cpu_accel.cli import serve
    from hf_cpu_accel.cli.main import app

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "find_spec", lambda package: None if package == "fastapi" else object())
        result = CliRunner().invoke(app, ["serve", str(tmp_path)])
    assert result.exit_code == 1
    assert 'not installed: fastapi; run pip install "hf_cpu_accel[serve]"' in result.output
