"""Layers that a survey of all model types found unfused: scalar gains, audio towers, BERT as a decoder."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.mllama.configuration_mllama import MllamaVisionConfig
from transformers.models.mllama.modeling_mllama import MllamaVisionEncoderLayer
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoderLayer

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.check import row_error
from tests.rewrite.encoder_families import SIZES

BOUNDS = {"float32": 1e-4, "bfloat16": 0.03, "int8": 0.15}


def in_a_list(layer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 0.5)
    return nn.ModuleDict({"layers": nn.ModuleList([layer])}).eval()


@pytest.mark.parametrize("dtype", BOUNDS)
@torch.no_grad()
def test_mllama_multiplies_branches_by_the_tanh_of_one_number(dtype: str) -> None:
    config = MllamaVisionConfig(hidden_size=64, attention_heads=4, intermediate_size=96)
    config._attn_implementation = "sdpa"
    model = in_a_list(MllamaVisionEncoderLayer(config, is_gated=True))
    mask = torch.zeros(2, 1, 9, 9)
    mask[1, :, :, 6:] = torch.finfo(torch.float32).min
    calls = [(torch.randn(2, length, 64), mask[..., :length, :length]) for length in (9, 4)]
    expected = [model["layers"][0](states, attention_mask=hidden) for states, hidden in calls]
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts()["encoder layer"] == 1
    for (states, hidden), theirs in zip(calls, expected, strict=True):
        assert row_error(model["layers"][0](states, attention_mask=hidden), theirs) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@torch.no_grad()
def test_towers_of_sounds_return_tuples_of_sequences(dtype: str) -> None:
    """Qwen2.5-Omni's: rows of all sounds, one after another."""
    config = Qwen2_5OmniAudioEncoderConfig(d_model=64, encoder_attention_heads=4, encoder_ffn_dim=96)
    config._attn_implementation = "sdpa"
    model = in_a_list(Qwen2_5OmniAudioEncoderLayer(config))
    states = torch.randn(14, 64)
    calls = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 5, 14], [0, 7, 14], [0, 14])]
    expected = [model["layers"][0](states, cu_seqlens=ends)[0] for ends in calls]
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts()["encoder layer"] == 1
    for ends, theirs in zip(calls, expected, strict=True):
        (ours,) = model["layers"][0](states, cu_seqlens=ends)
        assert row_error(ours, theirs) <= BOUNDS[dtype]


def bert_decoder() -> nn.Module:
    config = tf.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    return tf.BertLMHeadModel(config)


def git() -> nn.Module:
    tower = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    return tf.GitForCausalLM(
        tf.GitConfig(**SIZES, vision_config={**tower, "image_size": 16, "patch_size": 8})
    )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("build", [bert_decoder, git])
@torch.no_grad()
def test_branches_end_before_the_residual_that_an_epilogue_adds(build: Any, dtype: str) -> None:
    """Post-norm decoders, whose last linears of branches were fused with the sum and the norm."""
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    calls = [given(build, length, side) for length in (9, 4) for side in ("none", "right", "left")]
    expected = [model(**call).logits[call["attention_mask"].bool()] for call in calls]
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts()["decoder layer"] == 2
    for call, theirs in zip(calls, expected, strict=True):
        assert row_error(model(**call).logits[call["attention_mask"].bool()], theirs) <= BOUNDS[dtype]


def given(build: Any, length: int, side: str) -> dict[str, Tensor]:
    mask = torch.ones(2, length, dtype=torch.long)
    if side != "none":
        mask[1, slice(-2, None) if side == "right" else slice(0, 2)] = 0
    call = {"input_ids": torch.randint(5, 99, (2, length)), "attention_mask": mask}
    return call | ({"encoder_hidden_states": torch.randn(2, 5, 64)} if build is bert_decoder else {})


def test_experts_that_are_given_some_tokens_alone_are_no_error_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_experts": 3}
    config = tf.SwitchTransformersConfig(
        **sizes, num_layers=2, num_decoder_layers=2, decoder_start_token_id=0
    )
    model = tf.SwitchTransformersModel(config).eval()
    with caplog.at_level(logging.WARNING, logger="hf_cpu_accel"):
        accelerate_for_cpu(model, dtype="float32")
    assert "please report" not in caplog.text
