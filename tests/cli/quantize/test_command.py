"""`hf-cpu-accel quantize`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.cli.main import app
from tests.acceptance.tokenizers import SENTENCES, byte_bpe
from tests.rewrite.calibration.models import ids, model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    inner = model("llama")
    whole = LlamaForCausalLM(inner.config).eval()
    whole.model = inner
    whole.resize_token_embeddings(len(byte_bpe()))
    whole.save_pretrained(tmp_path / "checkpoint")
    byte_bpe().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "some.txt").write_text("\n".join(SENTENCES[:60]), encoding="utf-8")
    return tmp_path / "some.txt"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments), "--threads", "1"])
    return result.exit_code, result.output


def test_a_calibrated_folder_loads_the_calibrated_model(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    code, output = run(checkpoint, tmp_path / "packed", "--calibration", text)
    assert code == 0, output
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert explain(loaded).dtype == "int4"
    expected = AutoModelForCausalLM.from_pretrained(checkpoint)
    accelerate_for_cpu(
        expected, dtype="int4", calibration=[text.read_text(encoding="utf-8")], tokenizer=byte_bpe()
    )
    with torch.no_grad():
        assert torch.equal(loaded(ids(0)).logits, expected(ids(0)).logits)
    assert not list(tmp_path.glob("**/*.png"))


def test_the_report_proposes_a_mix_and_writes_it(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    code, output = run(
        *(checkpoint, tmp_path / "packed", "--report", "--size", 0.1, "--tokens", 256),
        *("--calibration", text, "--json", tmp_path / "report.json"),
    )
    assert code == 0, output
    for part in (
        "model.layers.*.mlp.down_proj  x2",
        "largest losses",
        "all bfloat16",
        "(at most 0.1 MB)",
        "loss of the outputs, nats",
    ):
        assert part in output
    assert (tmp_path / "packed" / "quantization.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    chosen = told["dtypes"]
    assert 0 < len(chosen) < len(told["linears"])
    found = {
        item.name: item.dtype
        for item in explain(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")).items
    }
    assert all(found[path] == dtype for path, dtype in chosen.items())
    others = [
        linear["path"]
        for linear in told["linears"]
        if linear["path"] not in chosen and "layers" in linear["path"]
    ]
    assert {found[path] for path in others} == {"int4"}
    size = sum(linear["options"][chosen.get(linear["path"], "int4")]["nbytes"] for linear in told["linears"])
    assert size <= 0.1e6


def test_only_a_report(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = run(checkpoint, "--dtype", "int8", "--report", "--accuracy", 0.999999, "--tokens", 128)
    assert code == 0, output
    assert "all int8" in output
    assert (tmp_path / "quantization.png").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "quantization.png"]


def test_wrong_arguments_are_rejected(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    for arguments, says in (
        ((checkpoint,), "nothing to do"),
        ((checkpoint, checkpoint), "expected another folder"),
        ((checkpoint, "--report", "--dtype", "float32"), "accepted are int4 and int8"),
        ((checkpoint, "--report", "--size", 1, "--accuracy", 0.9), "pass one of them"),
        ((checkpoint, "--report", "--accuracy", 99), "more than 0"),
        ((checkpoint, "--report", "--picture", "some.txt"), "accepted suffixes"),
        ((checkpoint, "--report", "--calibration", tmp_path / "empty.txt"), "is empty"),
        ((tmp_path / "nowhere", "--report"), "Cannot load"),
        ((checkpoint, tmp_path / "packed", "--size", 0.001, "--tokens", 128), "nothing is written"),
    ):
        code, output = run(*arguments)
        assert code, output
        assert not (tmp_path / "packed" / "cpu_accel.safetensors").exists()
        assert says in " ".join(output.replace("│", " ").split()), output
