"""Quantized folders that are damaged or not known: one error that says what, and nothing is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)

from hf_cpu_accel import restore
from hf_cpu_accel.checkpoints.layout import UnreadableCheckpoint
from tests.frontends.mutated_gptq import run
from tests.frontends.quantized_cases import FORMS, logits, write_folder, write_form

Q_PROJ = "model.layers.1.self_attn.q_proj"


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(fields)
    path.write_text(json.dumps(config))


def change_tensor(folder: Path, name: str, tensor: Tensor | None) -> None:
    file = load_file(folder / "model.safetensors")
    if tensor is None:
        del file[name]
    else:
        file[name] = tensor
    save_file(file, folder / "model.safetensors", {"format": "pt"})


def refused(folder: Path, message: str) -> None:
    with pytest.raises(UnreadableCheckpoint, match=message):
        AutoModelForCausalLM.from_pretrained(folder, cpu_optimize=True)


def test_hundreds_of_mutated_files_are_refused_or_read_as_by_others() -> None:
    counts, wrong = run(100, seed=20_000)
    assert not wrong
    assert sum(count for what, count in counts.items() if what.endswith("refused")) > 50


def test_unsupported_bits_are_rejected(tmp_path: Path) -> None:
    write_form(tmp_path, "gptq")
    change_config(tmp_path, bits=5)
    refused(tmp_path, "GPTQ with bits=5 is not supported; expected one of 2, 3, 4, 8")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{Q_PROJ}.scales", f"{Q_PROJ}.scales is missing; found g_idx, qweight, qzeros"),
        ("model.norm.weight", "model.norm.weight is missing"),
        ("lm_head.weight", "lm_head.weight is missing"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight is missing"),
    ],
)
def test_a_tensor_that_is_missing(tmp_path: Path, name: str, message: str) -> None:
    write_form(tmp_path, "gptq")
    change_tensor(tmp_path, name, None)
    refused(tmp_path, message)


def test_a_head_may_be_new_where_the_files_have_another(tmp_path: Path) -> None:
    write_form(tmp_path, "gptq")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, cpu_optimize=True)
    assert isinstance(model.score.weight, Tensor)


def test_a_linear_that_is_missing_as_a_whole(tmp_path: Path) -> None:
    write_form(tmp_path, "gptq")
    for name in ("qweight", "qzeros", "scales", "g_idx"):
        change_tensor(tmp_path, f"{Q_PROJ}.{name}", None)
    refused(tmp_path, f"{Q_PROJ}.weight is missing")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{Q_PROJ}.qweight", torch.zeros(4, 64, dtype=torch.int32), r"expected int32 \[8, 64\]"),
        ("model.norm.weight", torch.zeros(65), r"model.norm.weight is torch.float32 \[65\]"),
        ("model.embed_tokens.weight", torch.zeros(160, 64, dtype=torch.int32), "expected torch.float32"),
        (f"{Q_PROJ}.scales", torch.full((2, 64), torch.inf), "q_proj: scales contains NaN or infinity"),
        (
            "model.layers.7.mlp.up_proj.qweight",
            torch.zeros(1, dtype=torch.int32),
            "but the model has no linear at model.layers.7.mlp.up_proj",
        ),
    ],
)
def test_a_tensor_that_does_not_fit(tmp_path: Path, name: str, tensor: Tensor, message: str) -> None:
    write_form(tmp_path, "gptq")
    change_tensor(tmp_path, name, tensor)
    refused(tmp_path, message)


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    write_form(tmp_path, "awq-gemm")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(tmp_path, "cannot be read")


def test_a_quantized_head_that_the_config_ties(tmp_path: Path) -> None:
    write_form(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, tensor in FORMS["gptq"][1]("lm_head", 160, 64).tensors.items():
        change_tensor(tmp_path, f"lm_head.{name}", tensor)
    refused(tmp_path, "lm_head is quantized, but config.json ties its weight to another module")


def test_incomplete_experts_are_rejected(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 160}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 2}
    write_folder(tmp_path, MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval(), *FORMS["gptq"])
    name = "model.layers.0.block_sparse_moe.experts.0.w1.qweight"
    change_tensor(tmp_path, name, torch.zeros(8, 64, dtype=torch.int32))
    refused(tmp_path, r"experts.0.w1.qzeros is missing")


def test_other_devices_are_rejected(tmp_path: Path) -> None:
    write_form(tmp_path, "gptq")
    with pytest.raises(ValueError, match="device_map='cuda'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize=True, device_map="cuda")


def test_weights_that_stay_as_they_are_cannot_be_saved_packed(tmp_path: Path) -> None:
    write_form(tmp_path, "gptq")
    options = {"dtype": "float32", "skip_modules": ["*.down_proj"]}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize=options)
    with pytest.raises(
        ValueError,
        match=r"down_proj\.qweight belongs to a quantized weight that is not packed \(GPTQ, 4 bits",
    ):
        model.save_pretrained(tmp_path / "packed", packed=True)
    model.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", cpu_optimize=options)
    assert torch.equal(logits(again), logits(model))
    restore(model)
