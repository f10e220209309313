"""Makes `writer.py` importable for the tests of this folder, and offers its model as it is and accelerated."""

import sys
from pathlib import Path

import pytest
import torch

from hf_cpu_accel import accelerate_for_cpu

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def model():
    from writer import make_model

    return accelerate_for_cpu(make_model(), dtype="float32")


@pytest.fixture(scope="module")
def eager():
    from writer import make_model

    return make_model()


@pytest.fixture
def one_thread(_seed_and_threads):
    torch.set_num_threads(1)
