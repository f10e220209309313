"""Tiny random decoders of every family that must be accelerated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 128
LAYERS = 3
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_ROUTED = {**_GROUPED, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 512}
_GPT_NEO = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_layers": LAYERS,
    "num_heads": 4,
    "pad_token_id": 0,
}
_GPT_NEO |= {"attention_types": [[["global", "local", "global"], 1]], "window_size": 8}
_OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 64,
}
_FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "new_decoder_architecture": False,
}


@dataclass(frozen=True)
class Decoder:
    """A model class without its `ForCausalLM`, its config, and how many layers must be fused: in one op, around attention."""

    stem: str
    settings: dict[str, object] = field(default_factory=lambda: _GROUPED)
    fused: int = LAYERS
    cached: int = 0
    config: str = ""
    model: str = ""

    @property
    def routes(self) -> bool:
        """Return whether tokens go to experts."""
        return "num_experts_per_tok" in self.settings or "num_local_experts" in self.settings

    def build(self, seed: int = 0) -> nn.Module:
        """Eval mode. Biases and norms get noise and weights some size, so that a dropped or wrong one shows."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config or f"{self.stem}Config")(**self.settings)
        build: Callable[[object], nn.Module] = getattr(transformers, self.model or f"{self.stem}ForCausalLM")
        model = build(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1 or parameter.std() == 0:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif parameter.std() < 0.05:
                    parameter.mul_(4)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model


DECODERS = {
    "llama": Decoder("Llama"),
    "llama-3.2": Decoder("Llama", {**_GROUPED, "rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "mistral": Decoder("Mistral", {**_GROUPED, "sliding_window": 8}),
    "qwen2": Decoder("Qwen2"),
    "qwen2-window": Decoder(
        "Qwen2", {**_GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    ),
    "qwen3": Decoder("Qwen3", {**_GROUPED, "head_dim": 32}),
    "phi3": Decoder("Phi3"),
    "arcee": Decoder("Arcee"),
    "persimmon": Decoder("Persimmon", _SIZES),
    "neox": Decoder("GPTNeoX", _SIZES),
    "neox-sequential": Decoder("GPTNeoX", {**_SIZES, "use_parallel_residual": False}),
    "smollm3": Decoder("SmolLM3", {**_GROUPED, "no_rope_layer_interval": 2}),
    "olmo": Decoder("Olmo"),
    "olmo2": Decoder("Olmo2"),
    "granite": Decoder(
        "Granite", {**_GROUPED, "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 2.0}
    ),
    "gemma3": Decoder(
        "Gemma3",
        {
            **_GROUPED,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        config="Gemma3TextConfig",
    ),
    "gemma2": Decoder(
        "Gemma2",
        {
            **_GROUPED,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "gpt2": Decoder("GPT2", _GPT, model="GPT2LMHeadModel"),
    "gptj": Decoder("GPTJ", {**_GPT, "rotary_dim": 8}),
    "gpt-neo": Decoder("GPTNeo", _GPT_NEO),
    "opt": Decoder("OPT", _OPT),
    "opt-350m": Decoder("OPT", {**_OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "stablelm": Decoder("StableLm"),
    "stablelm-12b": Decoder(
        "StableLm", {**_GROUPED, "use_parallel_residual": True, "qk_layernorm": True}
    ),
    "phi": Decoder("Phi"),
    "falcon-7b": Decoder("Falcon", {**_FALCON, "multi_query": True}),
    "falcon-40b": Decoder("Falcon", {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-rw": Decoder(
        "Falcon", {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    ),
    "bloom": Decoder("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 96, "n_layer": LAYERS, "n_head": 6}),
    "mpt": Decoder(
        "Mpt",
        {"vocab_size": VOCABULARY, "d_model": 64, "n_layers": LAYERS, "n_heads": 4, "max_seq_len": 512},
    ),
    "cohere": Decoder("Cohere"),
    "command-r-plus": Decoder("Cohere", {**_GROUPED, "use_qk_norm": True}),
    "glm4": Decoder("Glm4", {**_GROUPED, "head_dim": 16}),
    "starcoder2": Decoder("Starcoder2", {**_GROUPED, "sliding_window": None}),
    "mixtral": Decoder("Mixtral", {**_GROUPED, "num_local_experts": 4}),
    "qwen2-moe": Decoder("Qwen2Moe", {**_ROUTED, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]}),
    "qwen3-moe": Decoder("Qwen3Moe", {**_ROUTED, "head_dim": 16, "norm_topk_prob": True}),
    "olmoe": Decoder("Olmoe", {**_GROUPED, "num_experts": 8, "num_experts_per_tok": 2}),
    "granite-moe": Decoder(
        "GraniteMoe", {**_GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2, "residual_multiplier": 0.3}
    ),
    "glm4-moe": Decoder(
        "Glm4Moe",
        {
            **_ROUTED,
            "head_dim": 16,
            "n_routed_experts": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen3.5": Decoder(
        "Qwen3_5", {**_GROUPED, "head_dim": 32, "layer_types": ["full_attention"] * LAYERS}, config="Qwen3_5TextConfig"
    ),
    "afmoe": Decoder(
        "Afmoe",
        {
            **_ROUTED,
            "head_dim": 16,
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "laguna": Decoder(
        "Laguna",
        {
            **_ROUTED,
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "num_attention_heads_per_layer": [16, 32, 16],
        },
    ),
    "bitnet": Decoder("BitNet"),
    "gpt-oss": Decoder(
        "GptOss",
        {
            **_GROUPED,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
        },
    ),
}  # fmt: skip


_ROTARY = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
_FACTORS = [1.0 + 0.5 * number for number in range(8)]

# Rotary positions that are scaled for sequences of more than 32 tokens, some of them only from there on.
SCALED = {
    "linear": Decoder(
        "Llama", {**_GROUPED, "rope_parameters": {**_ROTARY, "rope_type": "linear", "factor": 4.0}}
    ),
    "dynamic": Decoder(
        "Llama",
        {
            **_GROUPED,
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0},
        },
    ),
    "yarn": Decoder(
        "Qwen2", {**_GROUPED, "rope_parameters": {**_ROTARY, "rope_type": "yarn", "factor": 8.0}}
    ),
    "llama3": DECODERS["llama-3.2"],
    "longrope": Decoder(
        "Phi3",
        {
            **_GROUPED,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                **_ROTARY,
                "rope_type": "longrope",
                "short_factor": _FACTORS,
                "long_factor": [8 * factor for factor in _FACTORS],
            },
        },
    ),
}


# Their scores are not scaled down, and in models as small as these roundings of weights move them far.
UNSCALED = {
    # The last layer takes the keys and values of the first.
    "gemma4": Decoder(
        "Gemma4",
        {
            **_SIZES,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "global_head_dim": 64,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 32,
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 8,
            "final_logit_softcapping": 30.0,
        },
        config="Gemma4TextConfig",
    ),
}

# Layers with parts that the op does not have: those run one by one, or only what is beside attention does.
UNFUSED = {
    "glm4-moe-groups": Decoder(
        "Glm4Moe",
        {
            **_ROUTED,
            "head_dim": 16,
            "n_routed_experts": 8,
            "first_k_dense_replace": 0,
            "n_group": 4,
            "topk_group": 2,
        },
        fused=0,
        cached=LAYERS,
    ),
    "olmoe-clipped": Decoder(
        "Olmoe", {**_GROUPED, "num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 8.0}, fused=0
    ),
}


def padded(length: int = 9) -> dict[str, dict[str, Tensor]]:
    """Token ids [2, length] without padding, and with some on the left or on the right."""
    ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :3] = 0
    right[1, length - 2 :] = 0
    masks = {"full": torch.ones_like(ids), "left": left, "right": right}
    return {name: {"input_ids": ids, "attention_mask": mask} for name, mask in masks.items()}
