"""Decoders with this package's attention generate the same tokens."""

import pytest
import torch
import transformers
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from tests.rewrite.families import FAMILIES

_DECODER = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
}
_SEQ2SEQ = {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0, "bos_token_id": 0}
DECODERS = {
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {**FAMILIES["bart"].settings, **_SEQ2SEQ, "forced_eos_token_id": 1},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**FAMILIES["t5"].settings, **_SEQ2SEQ}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_DECODER, "num_key_value_heads": 2}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 99, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64},
    ),
    "bert decoder": ("BertLMHeadModel", "BertConfig", {**FAMILIES["bert"].settings, "is_decoder": True}),
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_generate_the_same_tokens(name):
    model_class, config_class, settings = DECODERS[name]
    config = getattr(transformers, config_class)(**settings)
    model: nn.Module = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    ids = torch.randint(5, 90, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 8,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    expected = model.generate(ids, **options)
    accelerate_for_cpu(model, dtype="float32")
    assert explain(model).counts()["attention"] >= 2
    for _ in range(2):
        assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(restore(model).generate(ids, **options), expected)
