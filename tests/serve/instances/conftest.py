"""Fake machines, as the tests of the hardware have them, and a tiny encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import transformers

from hf_cpu_accel import accelerate_for_cpu


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the fixture of all tests puts it back


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[Mapping[str, str]], Path]:
    """Write `{path below the root: text}` and give the root."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return tmp_path

    return write


@pytest.fixture(scope="session")
def encoder() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2
    )  # fmt: skip
    return accelerate_for_cpu(transformers.BertModel(config).eval(), dtype="float32", threads=1)
