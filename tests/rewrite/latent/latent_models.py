"""Tiny models of each kind with latent attention, with weights that make tokens differ."""

from __future__ import annotations

from typing import Any

import torch
import transformers

LAYERS = 2
_SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
          "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
          "v_head_dim": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 512}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8,
         "partial_rotary_factor": 1 / 3, "llama_4_scaling_beta": 0.5}  # fmt: skip

# By what tells their attention apart: {stem of the classes: settings}
MODELS: dict[str, dict[str, Any]] = {
    "DeepseekV2": _SIZES | _EXPERTS | {"q_lora_rank": None},  # complex factors
    "DeepseekV3": _SIZES | _EXPERTS,  # pairs
    "MiniCPM3": _SIZES,  # halves, scaled residuals
    "Mistral4": _SIZES | _EXPERTS | {"rope_parameters": _YARN},  # queries that grow with their position
}  # fmt: skip


# A token that goes to every expert: what is computed does not jump where rounding changes the choice.
ALL_EXPERTS = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}


def build(stem: str, **changed: Any) -> Any:
    config = getattr(transformers, f"{stem}Config")(**MODELS[stem] | changed)
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[-1] ** 0.5)
    return model
