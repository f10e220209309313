"""Makes `families.py` and `containers.py` importable for the tests of this folder, and keeps its tiny models on one thread."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cpu_accel.rewrite import apply, pending

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread(_seed_and_threads: None) -> None:
    """Threads that wait for one another in microsecond ops cost more than they save, the more so on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call of `decoder_layers` ran, in order; without the comparison of first calls, layer by layer."""
    monkeypatch.setattr(apply, "check_first_calls", lambda *model: None)
    calls: list[int] = []
    op = pending._DECODER_LAYERS

    def counted(*args: Any) -> Any:
        calls.append(len(args[3]))  # the layout
        return op(*args)

    monkeypatch.setattr(pending, "_DECODER_LAYERS", counted)
    return calls
