"""`hf-cpu-accel pack`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.cli.main import app
from tests.acceptance.tokenizers import wordpiece
from tests.frontends.packed.packed_cases import bert


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model, _, _ = bert()
    model.save_pretrained(tmp_path / "checkpoint")
    wordpiece().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["pack", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_folder_loads_the_packed_model(checkpoint: Path, tmp_path: Path) -> None:
    code, output = run(checkpoint, tmp_path / "packed", "--dtype", "int8", "--threads", 1)
    assert code == 0, output
    assert "BertForSequenceClassification, int8" in output
    steps = [line.split(" ")[0] for line in output.splitlines()]  # and a progress bar, where it takes long
    assert [step for step in steps if step in ("load", "pack", "write")] == ["load", "pack", "write"]
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "packed")
    assert explain(loaded).dtype == "int8"
    assert AutoTokenizer.from_pretrained(tmp_path / "packed").vocab_size == wordpiece().vocab_size
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    accelerate_for_cpu(model, dtype="int8")
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_dtypes_by_accuracy(checkpoint: Path, tmp_path: Path) -> None:
    code, output = run(checkpoint, tmp_path / "packed", "--accuracy", 0.9, "--threads", 1)
    assert code == 0, output
    told = " ".join(output.split())
    assert "accuracy=0.9: " in told
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "packed")
    assert explain(loaded).choices[0].accuracy == 0.9
    assert explain(loaded).dtype == "int8"


def test_wrong_arguments_are_rejected(checkpoint: Path, tmp_path: Path) -> None:
    for arguments, says in (
        ((checkpoint, checkpoint), "expected another folder"),
        ((checkpoint, tmp_path / "packed", "--dtype", "int3"), "int3"),
        ((checkpoint, tmp_path / "packed", "--accuracy", "2"), "accuracy=2.0"),
        ((tmp_path / "nowhere", tmp_path / "packed"), "Cannot load"),
    ):
        code, output = run(*arguments)
        assert code, output
        assert says in output
    assert not (tmp_path / "packed").exists()
    assert run(checkpoint, tmp_path / "packed")[0] == 0
    code, output = run(tmp_path / "packed", tmp_path / "again")
    assert code == 1
    assert "already quantized" in output
