"""The outputs of the C++ program are those of Python: make test-cpp (needs cmake and a C++ compiler, takes two minutes)."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedModel, ViTConfig, ViTModel

from hf_cpu_accel import accelerate_for_cpu, extension
from hf_cpu_accel.compiler.aot import export_aot

_SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("build")
    source = Path(__file__).parent
    subprocess.run(
        ["cmake", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"],
        check=True,
    )
    subprocess.run(["cmake", "--build", build], check=True)
    return build / "run_model"


def bert() -> tuple[PreTrainedModel, dict[str, Tensor], dict[str, Tensor]]:
    def tokens(batch: int, length: int) -> dict[str, Tensor]:
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[0, length // 2 + 1 :] = 0
        return {"input_ids": torch.randint(0, 99, (batch, length)), "attention_mask": mask}

    return BertModel(BertConfig(vocab_size=99, **_SHAPE)), tokens(2, 16), tokens(3, 41)


def vit() -> tuple[PreTrainedModel, dict[str, Tensor], dict[str, Tensor]]:
    images = torch.randn(3, 3, 64, 64)
    model = ViTModel(ViTConfig(image_size=64, patch_size=16, **_SHAPE))
    return model, {"pixel_values": images[:2]}, {"pixel_values": images}


def run(runner: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(part) for part in (runner, *arguments, "--ops", extension.status().path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("build", "dtype"), [(bert, "int8"), (vit, "float32")])
def test_outputs_are_those_of_python(build: object, dtype: str, runner: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example, inputs = build()  # type: ignore[operator]
    accelerate_for_cpu(model.eval(), dtype=dtype, padding="compute")  # as exported programs do
    path = export_aot(model, example, tmp_path / "model.pt2")
    torch.save(inputs, tmp_path / "inputs.pt")
    files = ("--inputs", tmp_path / "inputs.pt", "--outputs", tmp_path / "outputs.pt")
    result = run(runner, path, *files, "--repeat", 3, "--threads", 1)
    assert result.returncode == 0, result.stderr
    assert "last_hidden_state float[3, " in result.stdout
    assert "ms, median of 3 calls, 1 threads" in result.stdout
    with torch.inference_mode():
        expected = model(**inputs)
    outputs = torch.load(tmp_path / "outputs.pt", weights_only=True)
    for output, name in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, expected[name], rtol=1e-4, atol=1e-5)


def test_errors(runner: Path, tmp_path: Path) -> None:
    missing = run(runner, tmp_path / "absent.pt2", "--inputs", tmp_path / "absent.pt")
    assert (missing.returncode, missing.stderr) == (1, f"run_model: cannot read {tmp_path / 'absent.pt2'}\n")
    assert "--threads 0: expected" in run(runner, "model.pt2", "--inputs", "x", "--threads", "0").stderr
    assert "usage" in run(runner, "model.pt2").stderr
