"""Small decoders whose layers no matcher supports, by their use of the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

from tests.rewrite.cached.cached_models import spread

LAYERS = 2
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "vocab_size": 128}
_SIZES: dict[str, Any] = {**_IDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
                          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def doge() -> Any:
    """What keys are hidden follows from values in the cache."""
    return transformers.DogeForCausalLM(transformers.DogeConfig(**_SIZES, keep_window_size=8))


def deepseek() -> Any:
    """Keys of an indexer are in the cache, too, and experts are chosen."""
    sizes = {
        "index_topk": 6,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    }
    options = {
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 8,
    }
    config = transformers.DeepseekV32Config(
        **{**_SIZES, "num_key_value_heads": 4}, **_LATENT, **sizes, **options
    )
    return transformers.DeepseekV32ForCausalLM(config)


def zaya() -> Any:
    """Inputs of convolutions, and a state, are in the cache."""
    return transformers.ZayaForCausalLM(
        transformers.ZayaConfig(**_SIZES, head_dim=16, num_experts=4, moe_intermediate_size=32)
    )


def falcon() -> Any:
    """Attention beside a recurrence, which is an op that writes over its state in the cache."""
    sizes = {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 24,
        "mamba_n_groups": 2,
        "mamba_d_ssm": 128,
    }
    return transformers.FalconH1ForCausalLM(
        transformers.FalconH1Config(**_SIZES, **sizes, mamba_chunk_size=16)
    )


def gemma() -> Any:
    """The last layer attends to the keys and values of the one before it, which hands them on in a dictionary."""
    sizes = {
        "head_dim": 16,
        "num_kv_shared_layers": 1,
        "layer_types": ["full_attention"] * LAYERS,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 128,
        "activation_sparsity_pattern": [0.5, 0.0],
    }
    config = transformers.Gemma3nTextConfig(**{**_SIZES, **sizes, "intermediate_size": [128] * LAYERS})
    return transformers.Gemma3nForCausalLM(config)


def blip() -> Any:
    """Written-out attention over an encoder's output, with keys in their own cache."""
    config = transformers.BlipTextConfig(**_SIZES, encoder_hidden_size=48, is_decoder=True, sep_token_id=2)
    return BlipTextLMHeadModel(config)


DECODERS: dict[str, Callable[[], Any]] = {
    "doge": doge, "deepseek-v3.2": deepseek, "zaya": zaya, "falcon-h1": falcon, "gemma-3n": gemma, "blip": blip,
}  # fmt: skip


def build(name: str) -> Any:
    torch.manual_seed(0)
    return spread(DECODERS[name]().eval())


def given(name: str, batch: int) -> dict[str, Any]:
    """Arguments of its forward besides ids."""
    if name != "blip":
        return {}
    return {"encoder_hidden_states": torch.randn(batch, 5, 48, generator=torch.Generator().manual_seed(3))}
