"""Settings of published decoders that differ from the defaults of transformers, for `random_models`."""

from __future__ import annotations

from typing import Any

_SMOLLM2 = {
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_QWEN2_5 = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
QWEN3_0_6B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
}
LLAMA_3_2_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
# Only the language model.
_QWEN3_5 = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}
_LFM2 = {
    "hidden_size": 2048,
    "intermediate_size": 12288,  # `block_auto_adjust_ff_dim` reduces it to 8192
    "num_hidden_layers": 16,
    "layer_types": ["full_attention" if number in (2, 5, 8, 10, 12, 14) else "conv" for number in range(16)],
}
_GRANITE_4_H = {
    "vocab_size": 100352,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "shared_intermediate_size": 4096,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if number % 10 == 5 else "mamba" for number in range(40)],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "mamba_d_state": 128,
    "max_position_embeddings": 131072,
    "position_embedding_type": "nope",
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "logits_scaling": 6,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_GEMMA_4_E2B = {
    # Published: 262144. Then 2.3 of the 4.6 billion parameters are embeddings per layer, and a token reads only 35 of their rows.
    "vocab_size": 65536,
    "vocab_size_per_layer_input": 65536,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "layer_types": ["full_attention" if number % 5 == 4 else "sliding_attention" for number in range(35)],
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
_DEEPSEEK_V2_LITE = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 163840,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}

# name -> (transformers model type, settings)
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "Qwen2.5-0.5B": ("qwen2", _QWEN2_5),
    "Qwen3-0.6B": ("qwen3", QWEN3_0_6B),
    "Qwen3.5-0.8B": ("qwen3_5_text", _QWEN3_5),
    "Llama-3.2-1B": ("llama", LLAMA_3_2_1B),
    "LFM2-1.2B": ("lfm2", _LFM2),
    "Granite-4.0-H-1B": ("granitemoehybrid", _GRANITE_4_H),
    "Gemma-4-E2B": ("gemma4_text", _GEMMA_4_E2B),
    # The first 5 of 27 layers; all layers take 31 GB.
    "DeepSeek-V2-Lite-5-layers": ("deepseek_v2", {**_DEEPSEEK_V2_LITE, "num_hidden_layers": 5}),
    "SmolLM2-135M": (
        "llama",
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        | {"num_attention_heads": 9, "num_key_value_heads": 3}
        | _SMOLLM2,
    ),
    "SmolLM2-360M": (
        "llama",
        {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32}
        | {"num_attention_heads": 15, "num_key_value_heads": 5}
        | _SMOLLM2,
    ),
    "SmolLM3-3B": (
        "smollm3",
        {"max_position_embeddings": 65536, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    ),
}
