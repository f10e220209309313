"""A model as a compiled file: the same numbers for any batch and length, and clear refusals."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import package
from transformers import BertConfig, BertForQuestionAnswering

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.compiler import aot
from hf_cpu_accel.compiler.aot import export_aot, load_aot


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length // 2 + 1 :] = 0
    return {"input_ids": torch.randint(0, 99, (batch, length)), "attention_mask": mask}


@pytest.fixture
def another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles the same at the same time: while files are packed, it has just opened those of Inductor's folder to write them."""
    folder = tmp_path / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))

    def package_aoti(*arguments: object) -> object:
        for path in folder.rglob("*"):
            if path.is_file():
                path.write_bytes(b"")
        return original(*arguments)

    original = package.package_aoti
    monkeypatch.setattr(package, "package_aoti", package_aoti)


@pytest.mark.usefixtures("another_process")
def test_a_file_computes_what_the_accelerated_model_does(tmp_path: Path) -> None:
    config = BertConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=96, vocab_size=99
    )
    model = accelerate_for_cpu(BertForQuestionAnswering(config).eval(), dtype="int8")
    plan = explain(model).to_dict()
    path = export_aot(model, tokens(2, 16), tmp_path / "model.pt2")
    assert explain(model).to_dict() == plan
    compiled = load_aot(path)
    for batch, length in ((1, 1), (1, 33), (5, 16)):
        inputs = tokens(batch, length)
        with torch.inference_mode():
            expected = model(**inputs)
        outputs = compiled(**inputs)
        assert list(outputs) == ["start_logits", "end_logits"]
        for name, output in outputs.items():
            torch.testing.assert_close(output, expected[name], rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="attention_mask"):
        compiled(input_ids=torch.zeros(1, 3, dtype=torch.long))


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(3, 2).eval()


def test_refusals(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, path = {"input": torch.ones(2, 3)}, tmp_path / "model.pt2"
    with pytest.raises(ValueError, match=r"model\.so.*'\.pt2'"):
        export_aot(model, rows, tmp_path / "model.so")
    with pytest.raises(ValueError, match="nowhere"):
        export_aot(model, rows, tmp_path / "nowhere" / "model.pt2")
    with pytest.raises(ValueError, match=r"\['input'\] have one row"):
        export_aot(model, {"input": torch.ones(1, 3)}, path)
    with pytest.raises(ValueError, match="mapping"):
        export_aot(model, {}, path)
    with pytest.raises(ValueError, match="training mode"):
        export_aot(model.train(), rows, path)
    model.eval()
    monkeypatch.setattr(aot, "has_compiler", lambda: False)
    with pytest.raises(RuntimeError, match="apt install g"):
        export_aot(model, rows, path)
    assert not path.exists()
    with pytest.raises(ValueError, match="file not found"):
        load_aot(path)


class _Odd(nn.Module):
    def forward(self, input: Tensor) -> object:
        return {"kept": input, "count": len(input.shape)}


def test_outputs_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="output count is of type int"):
        export_aot(_Odd().eval(), {"input": torch.ones(2, 3)}, tmp_path / "model.pt2")
