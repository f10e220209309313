"""`make soak-server` for a few requests: all are answered, and neither a client nor the server goes on afterwards."""

from __future__ import annotations

import sys
import threading
import time

import psutil
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.serving import load
from tests.serve.instances.bound import within

SECONDS = 180  # on a busy machine
GROWING = [(0.0, 90), (1.0, 100), (2.0, 100), (3.0, 101), (4.0, 101), (5.0, 103)]


def lasting() -> list[threading.Thread]:
    """Threads that Python waits for at its end."""
    return [thread for thread in threading.enumerate() if not thread.daemon]


def test_a_few_requests_and_then_it_ends() -> None:
    threads, children = lasting(), psutil.Process().children()
    with within(SECONDS):
        counts = load.load(minutes=10, clients=2, requests=16)
    assert counts.asked == 16
    assert counts.wrong == counts.failed == []
    assert all(size > 0 for _, size in counts.memory)
    assert lasting() == threads
    assert psutil.Process().children() == children


def test_it_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(client: load.Client) -> None:
        time.sleep(0.01)
        client.counts.asked += 1

    monkeypatch.setattr(load.Client, "ask", ask)
    known = load.Expected([], [], [], [])
    with within(SECONDS):
        counts = load._ask_all(0, psutil.Process(), known, 0.01, 2, None)
    assert counts.asked


def test_a_server_that_ends_by_itself_is_told() -> None:
    known = load.Expected([], [], [], [])
    with psutil.Popen([sys.executable, "-c", ""]) as ended:
        while ended.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="the server has ended"):
            load._ask_all(0, ended, known, 10, 2, None)


@pytest.mark.parametrize(
    ("counts", "code"),
    [
        (load.Counts(asked=1, memory=GROWING[:-1]), 0),
        (load.Counts(asked=1, memory=GROWING), 1),
        (load.Counts(asked=1, memory=[(0.0, 100)], wrong=["stream: 'a' instead of 'b'"]), 1),
        (load.Counts(asked=1, memory=[(0.0, 100)], failed=["TimeoutError: timed out"]), 1),
    ],
)
def test_what_is_found_is_told(counts: load.Counts, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load", lambda *_: counts)
    app = typer.Typer()
    app.command()(load.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == code
    assert all(line in result.output for line in (*counts.wrong, *counts.failed, "1 requests, 0 left"))
