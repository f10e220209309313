"""Makes `decoders.py` importable for the tests of this folder, and keeps its tiny models on one thread."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread(_seed_and_threads: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture
def loops(monkeypatch):
    """The lengths of the prompts that went through our loops, in order."""
    from hf_cpu_accel.generate import hook

    calls = []

    def counting(loop):
        def counted(model, input_ids, *args, **kwargs):
            calls.append(input_ids.shape[1])
            return loop(model, input_ids, *args, **kwargs)

        return counted

    for name in ("decode", "beam_search"):
        monkeypatch.setattr(hook, name, counting(getattr(hook, name)))
    return calls
