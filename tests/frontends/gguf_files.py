"""GGUF files of small models of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.frontends import quantized_cases

SIZES = {**quantized_cases.SIZES, "head_dim": 16}
# Model type: architecture in the file.
FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
Kind = gguf.GGMLQuantizationType
KINDS = {"v_proj": Kind.Q8_0, "proj": Kind.Q4_1, "": Kind.Q8_0}


def blocks_of(array: np.ndarray, kind: Kind) -> np.ndarray:
    """Return an array in blocks: by the package gguf, or of random bytes where that only unpacks them."""
    try:
        return np.asarray(gguf.quantize(array, kind))
    except NotImplementedError:
        features, nbytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (*array.shape[:-1], array.shape[-1] // features * nbytes)
        blocks = np.random.default_rng(0).integers(0, 48, shape, dtype=np.uint8)
        assert np.isfinite(gguf.dequantize(blocks, kind)).all()
        return blocks


def write_file(
    folder: Path,
    model_type: str,
    *,
    kinds: Mapping[str, Kind] = KINDS,
    tokenizer: bool = False,
    **others: int,
) -> Path:
    """Write a small model with random weights: linears in Q4_1 and Q8_0, the table in Q8_0, the rest in float32.

    Args:
        kinds: {a part of a parameter's name: its blocks}; the first that matches counts.
        tokenizer: also write one of bytes.
        others: of SIZES.
    """
    architecture = FAMILIES[model_type]
    # transformers does not read the size of qwen3's heads from the file.
    heads = {"head_dim": 128} if model_type == "qwen3" else {}
    config = CONFIG_MAPPING[model_type](**SIZES | heads | others)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    path = folder / f"{model_type}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if model_type == "qwen3" else 16)
    writer.add_value_length(config.head_dim if model_type == "qwen3" else 16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(config.vocab_size)
    writer.add_pad_token_id(0)
    _add_tokens(writer, config.vocab_size, tokenizer)
    for name, values in model.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        file_name = names.get_name(stem)
        if file_name is None or name == "lm_head.weight":
            continue
        array = (values + 0.1 * torch.randn(values.shape)).numpy()
        if array.ndim == 1:
            writer.add_tensor(f"{file_name}.{suffix}", array)
            continue
        kind = next(kind for part, kind in kinds.items() if part in name)
        writer.add_tensor(f"{file_name}.{suffix}", blocks_of(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokens(writer: gguf.GGUFWriter, size: int, tokenizer: bool) -> None:
    """Names of tokens alone, or with the merges that make a tokenizer of bytes."""
    if not tokenizer:
        writer.add_token_list([f"t{number}" for number in range(size)])
        return
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())[:94]
    known = [*symbols, symbols[0] + symbols[1]]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*known, *(f"t{number}" for number in range(size - len(known)))])
    writer.add_token_merges([f"{symbols[0]} {symbols[1]}"])
    writer.add_eos_token_id(size - 1)
    writer.add_bos_token_id(size - 2)
