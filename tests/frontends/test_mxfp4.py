"""gpt-oss with `cpu_optimize=`: its experts are packed from the blocks of the file, which is written here as OpenAI writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.checkpoints.mxfp4 import Mxfp4Stack

IDS = torch.arange(14).view(2, 7) * 9 % 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    )
    path = tmp_path_factory.mktemp("gpt-oss")
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(path / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = value
            continue
        experts, in_features, out_features = value.shape
        shape = (experts, out_features, in_features // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((path / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(said))
    return path


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})


def assert_saved_as_by_the_host(model: Any, folder: Path, tmp_path: Path) -> None:
    """The files are compared, as transformers 5.23 doesn't read its own again."""
    model.save_pretrained(tmp_path / "ours")
    load(folder).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert len({(tmp_path / name / "config.json").read_text() for name in ("ours", "theirs")}) == 1
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_the_experts_equal_those_of_transformers(folder: Path) -> None:
    unpacked = load(folder)
    model = load(folder, cpu_optimize="float32")
    expected, given = logits(unpacked), logits(model)
    assert (given - expected).abs().max() <= 1e-3 * expected.abs().max()
    items = {item.name: item for item in explain(model).items}
    for number in range(2):
        item = items[f"model.layers.{number}.mlp.experts"]
        assert (item.structure, item.op, item.dtype) == ("experts (MXFP4)", "experts_ffn", "affine8")
        assert items[f"model.layers.{number}"].structure == "decoder layer"
        packed, theirs = (m.model.layers[number].mlp.experts for m in (model, unpacked))
        # 8 bits and a float16 scale and offset for every 32 of them.
        assert item.packed_bytes == (theirs.gate_up_proj.numel() + theirs.down_proj.numel()) * 9 // 8
        for name in ("gate_up_proj", "down_proj"):
            assert torch.equal(getattr(packed, name) + 0, getattr(theirs, name))


def test_restored_experts_are_in_blocks_and_compute(folder: Path, tmp_path: Path) -> None:
    model = load(folder, cpu_optimize=True)
    restore(model)
    stack = model.model.layers[1].mlp.experts.down_proj
    assert isinstance(stack, Mxfp4Stack)
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stack.blocks, stored["model.layers.1.mlp.experts.down_proj_blocks"])
    assert torch.equal(stack.scales, stored["model.layers.1.mlp.experts.down_proj_scales"])
    expected = logits(load(folder))
    assert torch.equal(logits(model), expected)
    assert_saved_as_by_the_host(model, folder, tmp_path)
    accelerate_for_cpu(model, dtype="float32")
    assert (logits(model) - expected).abs().max() <= 1e-3 * expected.abs().max()


@pytest.mark.parametrize("packed", [True, False])
def test_it_is_saved_packed_and_as_its_host_saves_it(folder: Path, tmp_path: Path, packed: bool) -> None:
    model = load(folder, cpu_optimize="float32")
    before = logits(model)
    if packed:
        model.save_pretrained(tmp_path, packed=True)
        assert torch.equal(logits(load(tmp_path)), before)
    else:
        assert_saved_as_by_the_host(model, folder, tmp_path)


def test_scales_beyond_half_precision_are_kept(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    scales = tensors["model.layers.0.mlp.experts.down_proj_scales"]
    scales[2] = 127 - 40  # of the third expert alone
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, unpacked = load(tmp_path, cpu_optimize="float32"), load(tmp_path)
    given, expected = (m.model.layers[0].mlp.experts.down_proj + 0 for m in (model, unpacked))
    assert torch.equal(given, expected)


def test_without_the_keyword_and_in_float16_transformers_unpacks(folder: Path) -> None:
    load(folder, cpu_optimize=True)
    assert not any(isinstance(p, Mxfp4Stack) for p in load(folder).parameters())
    half = load(folder, dtype=torch.float16, cpu_optimize="float32")
    restore(half)
    assert not any(isinstance(p, Mxfp4Stack) for p in half.parameters())


def test_originals_in_memory(folder: Path) -> None:
    model = load(folder, cpu_optimize={"originals": "memory"})
    assert isinstance(model.model.layers[0].mlp.experts._parameters["down_proj"], Mxfp4Stack)
    restore(model)
    assert torch.equal(logits(model), logits(load(folder)))
