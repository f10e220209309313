"""Servers that are measured beside rivals: how they are started and asked, and when a bar is missed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from benchmarks.serving import chat, embedders, embeddings
from benchmarks.serving.clients import Connection
from benchmarks.serving.embeddings import Load
from benchmarks.serving.process import free_port, server

# Listens on the port that it is given, and says that it is well.
HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_on_a_port_is_waited_for() -> None:
    port = free_port()
    with server([sys.executable, "-c", HEALTHY, str(port)], port) as (found, process):
        assert found == port
        assert process.is_running()
    assert not process.is_running()


def test_a_server_that_ends_before_it_serves_is_told() -> None:
    with (
        pytest.raises(RuntimeError, match="ended before it was ready"),
        server([sys.executable, "-c", ""], free_port()),
    ):
        pass


def test_a_rival_without_environment_says_how_it_gets_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path))
    for name, environment in (("openvino", "openvino-server"), ("infinity", "infinity")):
        with pytest.raises(RuntimeError, match=f"benchmarks.peers.setup {environment}"):
            embedders.rival(name, Path("model"), None)
    with (
        pytest.raises(RuntimeError, match=r"benchmarks.peers.setup llamacpp"),
        chat.llamacpp("int8", 2, Path()),
    ):
        pass


def test_streams_are_read_to_their_end() -> None:
    events = [
        b'data: {"choices": []}\n\n',
        b'data: {"usage": {"completion_tokens": 10}}\n\n',
        b"data: [DONE]\n\n",
    ]
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readexactly(3)
            writer.write(head + chunks + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def ask() -> list[bytes]:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with listening, Connection(listening.sockets[0].getsockname()[1]) as connection:
            return [(await connection.stream(b"ask"))[1] for _ in range(2)]

    for body in asyncio.run(ask()):
        assert all(event in body for event in events)


def load(rate: float, slow: float = 0.03) -> Load:
    return Load(rate, 0.01, slow, 0.001)


@pytest.mark.parametrize(
    ("many", "rival", "missed"),
    [
        (load(250), load(160), False),
        (load(249), load(160), True),  # not 2.5 times one at a time
        (load(250, slow=0.031), load(160), True),  # the slowest take more than 3 times the median
        (load(250), load(170), True),  # not 1.5 times the rival
    ],
)
def test_bars_of_embeddings(many: Load, rival: Load, missed: bool) -> None:
    found = {"ours": {1: [load(100)], 16: [many]}, "rival": {1: [load(90)], 16: [rival]}}
    assert embeddings.missed(found, 16) == missed
    assert embeddings.compared(found, 16).row_count == 4
