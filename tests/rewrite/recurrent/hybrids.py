"""Tiny models of each kind with recurrent layers, with weights that make tokens differ."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_DELTA = {
    "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_num_key_heads": 8,
    "linear_num_value_heads": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_MAMBA_2 = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 16,
            "n_groups": 1, "chunk_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}  # fmt: skip

_MAMBA_1 = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": None}  # fmt: skip

_GRANITE_EXPERTS = {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 6, "num_experts_per_tok": 2,
                    "shared_intermediate_size": 64, "intermediate_size": 32}  # fmt: skip

# {stem of the classes, and perhaps what is in a model besides: (settings, op of its mixers, mixers, layers with one that
# are fused as a whole, and such with attention)}
HYBRIDS: dict[str, tuple[dict[str, Any], str, int, int, int]] = {
    "Qwen3_5": (_SIZES | _DELTA, "gated_delta_net", 2, 2, 1),
    "Qwen3Next": (
        _SIZES | _DELTA | {"num_experts": 0, "mlp_only_layers": [0, 1, 2]},
        "gated_delta_net", 2, 2, 1,
    ),
    "Qwen3Next with experts": (
        _SIZES | _DELTA | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                           "shared_expert_intermediate_size": 64, "mlp_only_layers": [2], "decoder_sparse_step": 1},
        "gated_delta_net", 2, 2, 1,
    ),
    "Lfm2": (
        _SIZES | {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
        "short_convolution", 2, 2, 1,
    ),
    "GraniteMoeHybrid": (
        _SIZES | _MAMBA | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0,
                           "shared_intermediate_size": 128, "residual_multiplier": 0.4},
        "state_space", 2, 2, 1,
    ),
    "GraniteMoeHybrid with experts": (
        _SIZES | _MAMBA | _GRANITE_EXPERTS | {"residual_multiplier": 0.4}, "state_space", 2, 2, 1,
    ),
    "GraniteMoeHybrid with experts and plain residuals": (
        _SIZES | _MAMBA | _GRANITE_EXPERTS, "state_space", 2, 2, 1,
    ),
    "Qwen3_5Moe": (
        _SIZES | _DELTA | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                           "shared_expert_intermediate_size": 64},
        "gated_delta_net", 2, 2, 1,
    ),
    "Lfm2Moe": (
        _SIZES | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 6,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "short_convolution", 2, 2, 1,
    ),
    # whose layers return more than hidden states
    "Bamba": (_SIZES | _MAMBA | {"attn_layer_indices": [1]}, "state_space", 2, 2, 1),
    "FalconH1": (_SIZES | _MAMBA | {"mamba_d_ssm": 128, "ssm_in_multiplier": 0.7}, "state_space", 3, 0, 0),
    "Mamba2": (_MAMBA_2, "state_space", 2, 2, 0),
    "Jamba": (
        _SIZES | {"mamba_dt_rank": 8, "mamba_d_state": 16, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 6,
                  "num_experts_per_tok": 2, "expert_layer_period": 3, "expert_layer_offset": 2},
        "selective_scan", 2, 2, 1,
    ),
    # whose prompts bound the time steps, and whose layers have one branch each
    "NemotronH": (
        _SIZES | {"layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"], "mamba_num_heads": 8,
                  "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2, "chunk_size": 16, "time_step_min": 0.5},
        "state_space", 2, 2, 1,
    ),
    "Zamba2": (
        _SIZES | {"layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_expand": 2, "n_mamba_heads": 8, "mamba_d_state": 24,
                  "mamba_ngroups": 2, "chunk_size": 16, "time_step_min": 0.5, "num_mem_blocks": 1, "attention_head_dim": 32},
        "state_space", 3, 2, 0,
    ),
    "Mamba": (_MAMBA_1, "selective_scan", 2, 2, 0),
    "FalconMamba": (_MAMBA_1, "selective_scan", 2, 2, 0),
}  # fmt: skip


def build(stem: str) -> Any:
    settings, stem = HYBRIDS[stem][0], stem.partition(" ")[0]
    config = getattr(transformers, f"{stem}TextConfig" if stem.startswith("Qwen3_5") else f"{stem}Config")(
        **settings
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[1] ** 0.5)
    return model
