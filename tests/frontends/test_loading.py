"""`from_pretrained(cpu_optimize=...)` out of mapped files: the bits of accelerating what was loaded, and the weights again."""

from __future__ import annotations

import pytest
import torch
from diffusers import UNet2DModel
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from hf_cpu_accel import accelerate_for_cpu, restore

pytestmark = pytest.mark.usefixtures("installed")

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**SIZES, "num_key_value_heads": 2, "vocab_size": 96}
BLOCKS = {
    "block_out_channels": (32,),
    "down_block_types": ("AttnDownBlock2D",),
    "up_block_types": ("AttnUpBlock2D",),
}
MODELS = {
    "bert": lambda: BertModel(BertConfig(**SIZES, vocab_size=96)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**DECODER, tie_word_embeddings=True)),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**DECODER, num_local_experts=4)),
    "unet": lambda: UNet2DModel(sample_size=8, **BLOCKS),
}


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "originals"


def _save(name, weights, folder, shard="5GB"):
    torch.manual_seed(0)
    model = MODELS[name]().to(weights)
    model.save_pretrained(folder, max_shard_size=shard)
    return type(model)


def _in_memory(model):
    """The same, of which nothing is mapped."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int8-weight", "int4"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_result_is_bit_identical_to_loading_first(weights, dtype, tmp_path, home):
    cls = _save("bert", weights, tmp_path)
    loaded = cls.from_pretrained(tmp_path, cpu_optimize=dtype)
    expected = _in_memory(cls.from_pretrained(tmp_path))
    before = {name: value.clone() for name, value in expected.state_dict().items()}
    assert not home.exists()
    accelerate_for_cpu(expected, dtype=dtype)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).last_hidden_state, expected(ids).last_hidden_state)
    state = expected.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    restore(loaded)
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("name", ["tied", "experts", "unet"])
@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_tied_converted_and_sharded_weights(name, shard, tmp_path):
    cls = _save(name, torch.bfloat16, tmp_path, shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "100KB")
    options = {"torch_dtype": torch.bfloat16} if name == "unet" else {}
    loaded = cls.from_pretrained(tmp_path, cpu_optimize="int8", **options)
    expected = _in_memory(cls.from_pretrained(tmp_path, **options))
    before = {name: value.clone() for name, value in expected.state_dict().items()}
    accelerate_for_cpu(expected, dtype="int8")
    state = expected.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    restore(loaded)
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())


def test_models_saved_to_their_own_folder_are_complete(tmp_path):
    cls = _save("bert", torch.bfloat16, tmp_path)
    before = {name: value.clone() for name, value in cls.from_pretrained(tmp_path).state_dict().items()}
    loaded = cls.from_pretrained(tmp_path, cpu_optimize="int8")
    loaded.save_pretrained(tmp_path)
    again = cls.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in before.items())
    restore(loaded)
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())
