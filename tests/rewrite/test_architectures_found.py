"""Faults that a sweep over all model types has found, one small model each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.blt.configuration_blt import BltPatcherConfig
from transformers.models.blt.modeling_blt import BltPatcher
from transformers.models.videoprism.configuration_videoprism import VideoPrismTextConfig
from transformers.models.videoprism.modeling_videoprism import VideoPrismTextModel

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.rewrite.attention.match import AlsoSdpa
from hf_cpu_accel.rewrite.encoder.layer import FusedEncoderLayer

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
IDS = torch.randint(5, 99, (2, 9), generator=torch.Generator().manual_seed(3))
MASK = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])


def randomized(model: nn.Module, spread: float) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=spread)
    return model.eval()


def output(model: nn.Module, mask: Tensor | None = MASK) -> Tensor:
    with torch.no_grad():
        given = model(input_ids=IDS, attention_mask=mask)
    hidden = given["last_hidden_state"] if isinstance(given, dict) else given[-1]
    return hidden[mask.bool()] if mask is not None and mask.shape == hidden.shape[:2] else hidden


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_with_a_cap_are_not_fused(dtype: str) -> None:
    """VideoPrism's text model: scores of a small probe hardly differ from capped ones."""
    config = VideoPrismTextConfig(**SIZES, max_position_embeddings=32, attn_logit_softcapping=5.0)
    model = randomized(VideoPrismTextModel(config), 0.3)
    before = output(model, None)
    accelerate_for_cpu(model, dtype=dtype, verify=True)
    assert not any(isinstance(module, FusedEncoderLayer) for module in model.modules())
    bound = 1e-4 if dtype == "float32" else 0.05
    assert (output(model, None) - before).norm() <= bound * before.norm()


def test_models_that_return_tuples_are_accelerated() -> None:
    """BLT's patcher returns (entropies, lengths, logits), none of which is the output of its last layer."""
    config = BltPatcherConfig(**SIZES, num_key_value_heads=4, head_dim=16, max_position_embeddings=64)
    model = randomized(BltPatcher(config), 0.1)
    with torch.no_grad():
        before = model(input_ids=IDS)[2]
        accelerate_for_cpu(model, dtype="float32")
        after = model(input_ids=IDS)[2]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def deepseek() -> nn.Module:
    """Its attention looks at the two keys of the highest index scores, by a mask that is made if the implementation is "sdpa"."""
    sizes = {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
    }
    index = {"index_topk": 2, "index_n_heads": 4, "index_head_dim": 16}
    config = tf.DeepseekV32Config(
        **SIZES, **sizes, **experts, **index, num_key_value_heads=4, first_k_dense_replace=1
    )
    return randomized(tf.DeepseekV32Model(config), 0.1)


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
def test_models_that_ask_for_the_name_of_their_attention_compute_the_same(mask: Any) -> None:
    model = deepseek()
    before = output(model, mask)
    accelerate_for_cpu(model, dtype="float32")
    torch.testing.assert_close(output(model, mask), before, rtol=1e-3, atol=1e-4)
    assert model.config._attn_implementation == "sdpa"
    restore(model)
    assert torch.equal(output(model, mask), before)


def test_the_name_is_equal_to_both_and_found_as_ours() -> None:
    name = AlsoSdpa("hf_cpu_accel")
    assert name == "sdpa"
    assert name == "hf_cpu_accel"
    assert name in ("eager", "sdpa")
    assert name != "eager"
    assert {"sdpa": 1, "hf_cpu_accel": 2}[name] == 2
