"""Tiny models whose layers the op for decoder layers does not support, with weights that make tokens differ."""

from __future__ import annotations

from typing import Any

import torch
import transformers

LAYERS = 2
_SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
          "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
          "max_position_embeddings": 512}  # fmt: skip

# By what is in the way of one op: {stem of the classes: settings}
MODELS: dict[str, dict[str, Any]] = {
    "Apertus": _SIZES,  # an activation with parameters
    "NanoChat": _SIZES,  # heads that turn the other way, and are normed then
    "Phimoe": _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},  # tokens go to experts in a way of their own
    # linears in modules, which make tables of positions themselves
    "Moshi": _SIZES | {"head_dim": 16, "ffn_dim": 128, "sliding_window": 64, "audio_vocab_size": 32},
}  # fmt: skip


def build(stem: str) -> Any:
    config = getattr(transformers, f"{stem}Config")(**MODELS[stem])
    torch.manual_seed(0)
    return spread(getattr(transformers, f"{stem}ForCausalLM")(config).eval())


def spread(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[-1] ** 0.5)
    return model


def mimi() -> Any:
    """The encoder of a codec, whose layers scale what their branches give, and attend in a window."""
    config = transformers.MimiConfig(
        hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, codebook_size=32, codebook_dim=16, vector_quantization_hidden_dimension=16, num_filters=4,
        num_quantizers=4, sliding_window=4, upsampling_ratios=[4, 2], upsample_groups=32, sampling_rate=16000,
    )  # fmt: skip
    torch.manual_seed(0)
    return spread(transformers.MimiModel(config).eval())


def reading_both_ways() -> Any:
    """An encoder of texts made of a decoder's layers, with GELU in its tanh form between gated halves."""
    sizes = {**_SIZES, "eos_token_id": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
    types = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**sizes, layer_types=types, use_bidirectional_attention=True)
    torch.manual_seed(0)
    return spread(transformers.Gemma3TextModel(config).eval())
