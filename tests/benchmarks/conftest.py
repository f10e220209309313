"""Workers that start sooner, and no measurement of the machine."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import driver, harness
from tests.programs import Forked

PROBE = {"float32": 200.0, "bfloat16": 100.0, "int8": 800.0, "read_bandwidth": 40.0, "threads": 2}


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked from a process that has imported torch and transformers, which takes each of them seconds."""
    names = {"PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(driver, "subprocess", SimpleNamespace(Popen=Forked, **names))


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real probes take seconds each, and are tested where they live."""
    monkeypatch.setattr(harness, "probe", lambda threads: PROBE)
