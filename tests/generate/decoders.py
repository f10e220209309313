"""Tiny random models that generate text, accelerated copies, and prompts for them."""

from __future__ import annotations

import functools

import torch
import transformers
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain

VOCABULARY, PAD, END = 260, 0, 1
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_ENCODER_DECODER = {
    "decoder_start_token_id": PAD,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": 2,
}

_MODELS = {
    "llama": ("Llama", _GROUPED),
    "qwen2": ("Qwen2", _GROUPED),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 16}),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": 12}),
    "phi3": ("Phi3", _GROUPED),
    "gemma2": ("Gemma2", {**_GROUPED, "head_dim": 16, "sliding_window": 12}),
    "gpt2": ("GPT2", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512,
                      "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": 2}),
    "gpt-neox": ("GPTNeoX", _SIZES),
    "opt": ("OPT", {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "bloom": ("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4, "pad_token_id": PAD,
                        "eos_token_id": END, "bos_token_id": 2}),
    "t5": ("T5", {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
                  "tie_word_embeddings": False, **_ENCODER_DECODER}),
    "bart": ("Bart", {"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
                      "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
                      "decoder_ffn_dim": 96, "max_position_embeddings": 512, "forced_eos_token_id": None,
                      **_ENCODER_DECODER}),
}  # fmt: skip
DECODERS = tuple(_MODELS)
ENCODER_DECODERS = ("t5", "bart")
DECODER_ONLY = tuple(name for name in DECODERS if name not in ENCODER_DECODERS)


def build(name: str, seed: int = 0) -> nn.Module:
    """In eval mode, with weights large enough that tokens differ."""
    family, settings = _MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**settings)
    head = {"GPT2": "GPT2LMHeadModel"}.get(
        family, f"{family}ForConditionalGeneration" if name in ENCODER_DECODERS else f"{family}ForCausalLM"
    )
    model = getattr(transformers, head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter.std() < 0.05:
                parameter.mul_(5)
    return model


@functools.cache
def eager(name: str) -> nn.Module:
    return build(name)


@functools.cache
def accelerated(name: str, dtype: str = "float32", kv_cache: str = "auto") -> nn.Module:
    """Accelerated models are shared by the tests, which do not change them."""
    return accelerate_for_cpu(build(name), dtype=dtype, kv_cache=kv_cache)


def prompt(length: int = 7, batch: int = 1, padded: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` [batch, length]; padded on the left, more in earlier sequences, if asked for."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(batch - 1):
            missing = min(length - 1, 2 * (batch - 1 - row))
            ids[row, :missing], mask[row, :missing] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def both(name: str, inputs: dict[str, Tensor], seed: int = 0, **settings: object) -> tuple[object, object]:
    """Return the tokens of eager and of the accelerated model, with the same random numbers."""
    results = []
    for model in (eager(name), accelerated(name)):
        torch.manual_seed(seed)
        copies = {key: value.clone() for key, value in inputs.items()}
        results.append(model.generate(**copies, **settings))
    return results[0], results[1]


def assert_same(name: str, inputs: dict[str, Tensor], seed: int = 0, **settings: object) -> Tensor:
    expected, tokens = both(name, inputs, seed, **settings)
    assert tokens.tolist() == expected.tolist()
    return tokens


def generation_items(model):
    return {item.structure: item for item in explain(model).items if item.name.endswith("generate")}
