"""A tiny encoder, one thread, and an end to waiting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from hf_cpu_accel import accelerate_for_cpu
from tests.serve.instances.bound import within

SECONDS = 180  # for one test, on a busy machine


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the fixture of all tests puts it back


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """A pool that forgets to wake whom it holds back fails its test."""
    with within(SECONDS):
        yield


@pytest.fixture(scope="session")
def encoder() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2
    )  # fmt: skip
    return accelerate_for_cpu(transformers.BertModel(config).eval(), dtype="float32", threads=1)
