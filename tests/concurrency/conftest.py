"""Makes `faults.py` importable for the tests of this folder, and keeps its tiny models on one thread."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread(_seed_and_threads: None) -> None:
    torch.set_num_threads(1)
