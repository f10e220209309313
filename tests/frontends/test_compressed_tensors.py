"""Folders that the compressed-tensors package wrote, loaded without it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_cpu_accel import explain, restore
from hf_cpu_accel.checkpoints.stored_linear import StoredLinear
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from tests.frontends.quantized_cases import llama, logits, seed_of

pytestmark = pytest.mark.filterwarnings("ignore:.*asks for activations")

INT8, FP8 = ({"num_bits": 8, "type": kind, "dynamic": True, "strategy": "token"} for kind in ("int", "float"))
# Weights, activations, the format that is asked for, what becomes of it in float32.
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str | None, str]] = {
    "w4a16": ({"num_bits": 4, "strategy": "group", "group_size": 32}, None, None, "affine4"),
    "w4a16-asymmetric": (
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        None,
        None,
        "affine4",
    ),
    "w4a16-rows": ({"num_bits": 4, "strategy": "channel", "symmetric": False}, None, None, "affine4"),
    "w8a16": ({"num_bits": 8, "strategy": "channel"}, None, None, "affine8"),
    "w8a8": ({"num_bits": 8, "strategy": "channel"}, INT8, None, "affine8"),
    "w8a8-asymmetric": ({"num_bits": 8, "strategy": "channel", "symmetric": False}, INT8, None, "affine8"),
    "w8a8-tensor": ({"num_bits": 8, "strategy": "tensor"}, INT8, None, "affine8"),
    "w8-groups": (
        {"num_bits": 8, "strategy": "group", "group_size": 16},
        None,
        "naive-quantized",
        "affine8",
    ),
    "w4-plain": ({"num_bits": 4, "strategy": "channel"}, None, "naive-quantized", "affine4"),
    "fp8-tensor": ({"num_bits": 8, "type": "float", "strategy": "tensor"}, FP8, None, "float32"),
    "fp8-rows": ({"num_bits": 8, "type": "float", "strategy": "channel"}, FP8, None, "float32"),
    "fp8-blocks": (
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 48]},
        None,
        None,
        "float32",
    ),
}


def write(folder: Path, weights: dict[str, Any], activations: Any, form: str | None) -> Any:
    """Write a small model; the same with the weights that the package decompresses."""
    model: Any = llama()
    dense = copy.deepcopy(model)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=activations and QuantizationArgs(**activations),
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            scale, zero = calculate_qparams(*_range(module.weight.data, weights), scheme.weights)
            module.weight_scale.data = scale.view_as(module.weight_scale).to(module.weight_scale.dtype)
            if hasattr(module, "weight_zero_point"):
                zeros = module.weight_zero_point
                zeros.data = zero.view_as(zeros).to(zeros.dtype)
    compressor = ModelCompressor.from_pretrained_model(model, form)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    state = {name: value for name, value in model.state_dict().items() if name in dense.state_dict()}
    dense.load_state_dict(state)
    return dense


def _range(weight: Tensor, said: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if said["strategy"] == "tensor":
        return weight.amin().view(1), weight.amax().view(1)
    high, wide = said.get("block_structure", (1, said.get("group_size", weight.shape[1])))
    padding = (0, -weight.shape[1] % wide, 0, -weight.shape[0] % high)
    blocks = torch.nn.functional.pad(weight, padding).unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def near(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", SCHEMES)
def test_results_equal_the_decompressed_weights(tmp_path: Path, name: str) -> None:
    *scheme, dtype = SCHEMES[name]
    expected = logits(write(tmp_path, *scheme))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize="float32")
    linears = [m for path, m in model.named_modules() if isinstance(m, PackedLinear) and "layers" in path]
    assert [m.packed_dtype for m in linears] == [dtype] * 14
    assert near(logits(model), expected) <= 1e-3
    assert explain(model).counts()["decoder layer"] == 2
    restore(model)
    assert sum(isinstance(module, StoredLinear) for module in model.modules()) == 14
    assert near(logits(model), expected) <= 1e-5


def test_an_order_by_activation_of_an_older_file(tmp_path: Path) -> None:
    """Newer versions of the package do not write `weight_g_idx`; what it says is which scale an input feature has."""
    scheme = SCHEMES["w4a16-asymmetric"][0]
    dense = write(tmp_path, scheme, None, None)
    file = load_file(tmp_path / "model.safetensors")
    for path, module in dense.named_modules():
        if f"{path}.weight_packed" in file:
            columns = module.weight.shape[1]
            generator = torch.Generator().manual_seed(seed_of(f"{columns}"))
            index = (torch.arange(columns) // 32)[torch.randperm(columns, generator=generator)]
            scale, zero = _scale_and_zero(file, path, columns)
            q = module.weight.data / scale.repeat_interleave(32, 1) + zero.repeat_interleave(32, 1)
            module.weight.data = (q.round() - zero[:, index]) * scale[:, index]
            file[f"{path}.weight_g_idx"] = index.int()
    save_file(file, tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize="float32")
    assert near(logits(model), logits(dense)) <= 1e-3
    assert model.model.layers[0].self_attn.q_proj.permutation is not None


def _scale_and_zero(file: dict[str, Tensor], path: str, columns: int) -> tuple[Tensor, Tensor]:
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32

    scale = file[f"{path}.weight_scale"]
    zero = unpack_from_int32(file[f"{path}.weight_zero_point"], 4, torch.Size(scale.shape), packed_dim=0)
    return scale, zero.float()


def test_ignored_cache_quantization_is_reported(tmp_path: Path) -> None:
    write(tmp_path, *SCHEMES["w8a8"][:3])
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace('"kv_cache_scheme": null', '"kv_cache_scheme": {"num_bits": 8}')
    )
    with pytest.warns(UserWarning, match="the config requests") as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize="float32")
    messages = [str(warning.message) for warning in caught if "the config requests" in str(warning.message)]
    assert ["activations in 8 bits" in line or "a quantized KV cache" in line for line in messages] == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"num_bits": 4', '"num_bits": 3', "in 3 bits are not supported; expected int in 4 or 8 bits"),
        (
            '"format": "pack-quantized"',
            '"format": "marlin-24"',
            "format='marlin-24' is not supported; expected one of pack-quantized",
        ),
        ('"strategy": "group"', '"strategy": "tensor_group"', "strategy='tensor_group'"),
        ('"Linear"', '"Conv2d"', "q_proj is quantized in the file, but its config has no scheme for it"),
        (
            '"group_size": 32',
            '"group_size": 16',
            r"weight_scale has dtype torch.float32 and shape \[64, 2\]: expected",
        ),
        ('"num_bits": 4', '"num_bits": 8', "weight_packed has dtype torch.int32"),
        ('"sparsity_config": {}', '"sparsity_config": {"format": "sparse-24-bitmask"}', "sparse weights"),
    ],
)
def test_unsupported_configs_are_rejected(tmp_path: Path, old: str, new: str, message: str) -> None:
    write(tmp_path, *SCHEMES["w4a16"][:3])
    config = tmp_path / "config.json"
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, cpu_optimize=True)
