"""Makes `writer.py` and the tiny pipelines of diffusers importable for these tests, and offers a writer."""

import sys
from pathlib import Path

import pytest
import torch

from hf_cpu_accel import accelerate_for_cpu

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "frontends")]


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
