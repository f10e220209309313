"""Commands that load a MODEL take the path of a GGUF file: its blocks are what is accelerated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from hf_cpu_accel import explain
from hf_cpu_accel.cli import loading
from hf_cpu_accel.cli.bench import contest, generation_workload
from hf_cpu_accel.cli.main import app
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.runtime import hardware
from tests.cli.test_report import PEAKS
from tests.frontends.gguf_files import Kind, write_file


def run(*arguments: object, said: str = "") -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], input=said, env={"COLUMNS": "200"})


def packed_dtypes(model: Any) -> set[str]:
    return {module.packed_dtype for module in model.modules() if isinstance(module, PackedLinear)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of a Llama with a tokenizer of bytes; one kind of its tensors is of a type that transformers' reader lacks."""
    kinds = {"v_proj": Kind.Q5_0, "proj": Kind.Q4_1, "": Kind.Q8_0}
    return write_file(tmp_path, "llama", kinds=kinds, tokenizer=True)


def test_chat(file: Path) -> None:
    result = run("chat", file, "--new", 5, "--threads", 1, said="hello\n/exit\n")
    assert result.exit_code == 0, result.output
    assert "llama.gguf, " in result.output
    assert "5 tokens" in result.output


def test_pack(file: Path, tmp_path: Path) -> None:
    result = run("pack", file, tmp_path / "packed", "--dtype", "float32", "--threads", 1)
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM, float32" in result.output
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(str(file), cpu_optimize="float32")
    assert packed_dtypes(loaded) == packed_dtypes(model) == {"affine4", "affine8"}
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "packed")("hello")["input_ids"] == [71, 68, 75, 75, 78]


@pytest.mark.parametrize("task", ["text-generation", "feature-extraction"])
def test_bench(file: Path, tmp_path: Path, task: str) -> None:
    shape = ("--prompt", 9, "--new", 3) if task == "text-generation" else ("--seq", 9)
    out = tmp_path / "out.json"
    result = run("bench", file, "--task", task, *shape, "--repeats", 1, "--threads", 1, "--json", out)
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document["workload"]["model"] == "llama.gguf"
    systems = [system["system"] for system in document["systems"]]
    assert systems == ["eager float32", *(["eager bfloat16"] if task == "text-generation" else []), "auto"]


def test_bench_accelerates_the_blocks(file: Path) -> None:
    workload = generation_workload.workload(str(file), None, 1, 9, 3)
    eager = workload.build()
    assert {parameter.dtype for parameter in eager.parameters()} == {torch.bfloat16}
    stored = workload.to_accelerate(eager)
    assert {type(module).__name__ for module in stored.modules()} >= {"GgufLinear", "GgufEmbedding"}
    assert not stored.generation_config.do_sample


def test_bench_rejects_tasks_without_gguf_support(file: Path) -> None:
    with pytest.raises(ValueError, match="'sentence-similarity' is not supported for GGUF files"):
        contest.contest(
            str(file),
            None,
            "sentence-similarity",
            batch=1,
            seq=9,
            prompt=None,
            new=None,
            dtypes=None,
            eager=None,
        )


def test_report(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "measure_peaks", lambda threads: PEAKS)
    out = tmp_path / "page.html"
    result = run("report", file, "--seq", 8, "--repeats", 1, "--threads", 1, "-o", out)
    assert result.exit_code == 0, result.output
    page = out.read_text(encoding="utf-8")
    assert "<h1>llama.gguf</h1>" in page
    assert "GGUF Q4_1" in page


def test_supports(file: Path) -> None:
    result = run("supports", file, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "(llama), float32" in result.output
    assert "Every layer runs as one call." in result.output


def test_quantize_rejects_quantized_files(file: Path, tmp_path: Path) -> None:
    result = run("quantize", file, tmp_path / "out")
    assert result.exit_code == 2
    assert "llama.gguf is already quantized: use `pack`" in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["chat", "pack", "bench", "report", "supports"])
def test_damaged_files_are_rejected_with_a_message(tmp_path: Path, command: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 200)
    folder = [tmp_path / "packed"] if command == "pack" else []
    result = run(command, path, *folder)
    assert result.exit_code in (1, 2)
    assert "broken.gguf" in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception


def test_other_models_have_no_blocks(tmp_path: Path) -> None:
    assert loading.blocks_of(str(tmp_path), "AutoModel") is None
    assert loading.default_dtypes(str(tmp_path), ("int8",)) == ("int8",)


assert explain  # the keyword is there because it is imported
