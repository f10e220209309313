"""A writer, which is a small decoder with a tokenizer; and the hub of the models that README and docs name."""

import os
from pathlib import Path

import pytest
import torch

from hf_cpu_accel import accelerate_for_cpu
from tests.acceptance.hub import make_hub
from tests.acceptance.writer import make_model


@pytest.fixture
def model():
    return accelerate_for_cpu(make_model(), dtype="float32")


@pytest.fixture(scope="module")
def eager():
    return make_model()


@pytest.fixture
def one_thread(_seed_and_threads):
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def hub():
    cache = Path(os.environ["HF_HOME"]) / "hub"
    make_hub(cache)
    return cache
