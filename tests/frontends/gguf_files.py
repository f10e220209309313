"""GGUF files of small models of transformers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.frontends import quantised_cases

SIZES = {**quantised_cases.SIZES, "head_dim": 16}
# Model type: architecture in the file.
FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


def write_file(folder: Path, model_type: str, **others: int) -> Path:
    """A small model with random weights: linears in Q4_1 and Q8_0, the table in Q8_0, the rest in float32.

    Args:
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
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(config.head_dim if model_type == "qwen3" else 16)
    writer.add_value_length(config.head_dim if model_type == "qwen3" else 16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(config.vocab_size)
    writer.add_pad_token_id(0)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    for name, values in model.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        file_name = names.get_name(stem)
        if file_name is None or name == "lm_head.weight":
            continue
        array = (values + 0.1 * torch.randn(values.shape)).numpy()
        if array.ndim == 1:
            writer.add_tensor(f"{file_name}.{suffix}", array)
            continue
        kind = Q4_1 if "proj" in name and "v_proj" not in name else Q8_0
        blocks = gguf.quantize(array, kind)
        writer.add_tensor(f"{file_name}.{suffix}", np.asarray(blocks), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
