"""The server as a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from typing import Any


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
