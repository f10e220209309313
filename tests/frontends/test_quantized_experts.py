"""Experts that GPTQ, AWQ and compressed-tensors have quantized one by one: packed as they are, given back, saved again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.checkpoints.layout import UnreadableCheckpoint
from hf_cpu_accel.checkpoints.stored_stack import LinearsStack
from tests.checkpoints.writers import Written, awq, gptq
from tests.frontends.quantized_cases import AWQ, GPTQ, by_activation, logits, seed_of

EXPERTS, FEATURES, INNER = 4, 64, 96
SIZES = {
    "vocab_size": 160,
    "hidden_size": FEATURES,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
Write = Callable[[str, int, int], Written]


def mixtral() -> Any:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(**SIZES, intermediate_size=INNER, num_local_experts=EXPERTS)
    )


def qwen3() -> Any:
    inner = {"intermediate_size": 128, "moe_intermediate_size": INNER, "head_dim": 16}
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**SIZES, **inner, num_experts=EXPERTS, num_experts_per_tok=2)
    )


# A model, its block of experts and its linears (gate, up, down) by the names of files.
MODELS = {
    "mixtral": (mixtral, "block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3": (qwen3, "mlp", ("gate_proj", "up_proj", "down_proj")),
}
W4A16 = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}


def compressed(path: str, rows: int, columns: int) -> Written:
    """By the package itself."""
    torch.manual_seed(seed_of(path))
    carrier: Any = nn.Sequential(nn.Linear(columns, rows, bias=False))
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**W4A16))
    apply_quantization_config(carrier, QuantizationConfig(config_groups={"all": scheme}))
    groups = carrier[0].weight.detach().unflatten(1, (-1, 32))
    scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
    carrier[0].weight_scale.data.copy_(scale)
    carrier[0].weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(carrier, None)
    compressor.compress_model(carrier)
    tensors = {name.removeprefix("0."): value.clone() for name, value in carrier.state_dict().items()}
    compressor.decompress_model(carrier)
    return Written(tensors, carrier[0].weight.detach().clone())


FORMS: dict[str, tuple[dict[str, Any], Write]] = {
    "gptq": (GPTQ, lambda path, rows, columns: gptq(rows, columns, seed=seed_of(path))),
    "gptq-8bits": (
        GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2", "group_size": -1},
        lambda path, rows, columns: gptq(rows, columns, bits=8, group=-1, version=2, seed=seed_of(path)),
    ),
    "awq": (
        AWQ | {"version": "gemm"},
        lambda path, rows, columns: awq(rows, columns, seed=seed_of(path)),
    ),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"all": {"targets": ["Linear"], "weights": W4A16 | {"type": "int"}}},
            "ignore": ["lm_head"],
        },
        compressed,
    ),
}


def write(folder: Path, name: str, form: str, *, dtype: str = "float32", of: Write | None = None) -> Any:
    """Write a small model with all linears of its layers quantized; the same with the weights that they stand for."""
    make, block, parts = MODELS[name]
    said, write_linear = FORMS[form][0], of or FORMS[form][1]
    torch.manual_seed(0)
    model = make().eval()
    dense, state = copy.deepcopy(model), model.state_dict()

    def quantized(path: str, rows: int, columns: int) -> Tensor:
        written = write_linear(path, rows, columns)
        state.update({f"{path}.{key}": value for key, value in written.tensors.items()})
        return written.weight

    for path, module in dense.named_modules():
        if isinstance(module, nn.Linear) and "layers" in path:
            module.weight.data = quantized(path, *module.weight.shape)
            del state[f"{path}.weight"]
    for number, layer in enumerate(dense.model.layers):
        at, experts = f"model.layers.{number}", layer.mlp.experts
        for key in ("gate_up_proj", "down_proj"):
            del state[f"{at}.mlp.experts.{key}"]
        state[f"{at}.{block}.gate.weight"] = state.pop(f"{at}.mlp.gate.weight")
        for expert in range(EXPERTS):
            gate, up, down = (f"{at}.{block}.experts.{expert}.{part}" for part in parts)
            both = [quantized(path, INNER, FEATURES) for path in (gate, up)]
            experts.gate_up_proj.data[expert] = torch.cat(both)
            experts.down_proj.data[expert] = quantized(down, FEATURES, INNER)
    folder.mkdir(exist_ok=True)
    cast = getattr(torch, dtype)
    plain = {key: value.to(cast) if value.dtype is torch.float32 else value for key, value in state.items()}
    save_file(
        {key: value.contiguous().clone() for key, value in plain.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    said = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "dtype": dtype,
        "quantization_config": said,
    }
    (folder / "config.json").write_text(json.dumps(said))
    return dense


def load(folder: Path, optimize: Any = "float32") -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(folder, cpu_optimize=optimize)


def near(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("name", "form"), [*(("mixtral", form) for form in FORMS), ("qwen3", "gptq"), ("qwen3", "awq")]
)
def test_results_equal_the_dequantized_weights(tmp_path: Path, name: str, form: str) -> None:
    dense = write(tmp_path, name, form)
    expected, packed = logits(dense), "affine8" if form == "gptq-8bits" else "affine4"
    model = load(tmp_path)
    rows = {item.name: item for item in explain(model).items}
    for number in range(2):
        item = rows[f"model.layers.{number}.mlp.experts"]
        assert (item.op, item.dtype, item.reason) == ("experts_ffn", packed, None)
        assert rows[f"model.layers.{number}"].reason is None  # the whole layer is one call
    assert near(logits(model), expected) <= 1e-3
    options = {"max_new_tokens": 4, "do_sample": False}
    prompt = torch.tensor([[1, 2, 3]])
    assert torch.equal(model.generate(prompt, **options), dense.generate(prompt, **options))

    restore(model)
    stack = model.model.layers[1].mlp.experts.down_proj
    assert isinstance(stack, LinearsStack)
    assert torch.equal(stack + 0, dense.model.layers[1].mlp.experts.down_proj)
    assert near(logits(model), expected) <= 1e-5
    file = load_file(tmp_path / "model.safetensors")
    state = {key.replace(".mlp.", f".{MODELS[name][1]}."): value for key, value in model.state_dict().items()}
    assert set(state) == set(file)
    for key in (key for key in file if ".experts." in key):
        assert torch.equal(state[key], file[key])


@pytest.mark.parametrize("packed", [True, False])
def test_saved_packed_and_plain(tmp_path: Path, packed: bool) -> None:
    write(tmp_path / "file", "mixtral", "gptq")
    model = load(tmp_path / "file")
    before = logits(model)
    model.save_pretrained(tmp_path / "again", packed=packed)
    assert torch.equal(logits(load(tmp_path / "again", None if packed else "float32")), before)


def test_float16_becomes_float32(tmp_path: Path) -> None:
    dense = write(tmp_path, "mixtral", "awq", dtype="float16")
    model = load(tmp_path, True)
    assert model.dtype is torch.float32
    assert near(logits(model), logits(dense)) <= 2e-2  # of the weights that are not quantized
    restore(model)
    accelerate_for_cpu(model, dtype="float32")
    assert explain(model).counts()["experts (AWQ, 4 bits in groups of 32)"] == 2


def test_an_order_by_activation_stays_as_it_is_stored(tmp_path: Path) -> None:
    dense = write(tmp_path, "mixtral", "gptq", of=by_activation)
    model = load(tmp_path)
    left = {item.name: item.reason for item in explain(model).left}
    assert (
        "experts whose input features are reordered are not supported" in left["model.layers.0.mlp.experts"]
    )
    assert near(logits(model), logits(dense)) <= 1e-3


def test_a_copy_computes_the_same(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "gptq")
    model = load(tmp_path)
    other = copy.deepcopy(model)
    assert torch.equal(logits(other), logits(model))
    restore(other)
    assert near(logits(other), logits(model)) <= 1e-3


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.layers.1.block_sparse_moe.experts.2.w3.qweight", "experts.2.w3.qweight is missing"),
        (None, "experts.3.w2 is not quantized, but other experts of the layer are"),
    ],
)
def test_incomplete_experts_are_rejected(tmp_path: Path, key: str | None, message: str) -> None:
    write(tmp_path, "mixtral", "awq")
    file = load_file(tmp_path / "model.safetensors")
    last = "model.layers.0.block_sparse_moe.experts.3.w2."
    for name in [name for name in file if name == key or (key is None and name.startswith(last))]:
        del file[name]
    save_file(file, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnreadableCheckpoint, match=message):
        load(tmp_path)
