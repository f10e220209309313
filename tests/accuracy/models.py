"""Small models whose layers differ in what 8 bits do to them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

BAD = "encoder.layer.1.output.dense"
_OUTLIERS = slice(0, 256, 32)  # two in each block that the rotation of int8 mixes by itself


def bert(*, bad: bool = False) -> BertModel:
    """Three layers of BERT; `bad`: one linear has columns so large that in 8 bits nothing of the others is left.

    What they are multiplied by is as small as they are large, so that the others matter.
    """
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, vocab_size=300,
        max_position_embeddings=64,
    )  # fmt: skip
    model = BertModel(config).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(4)
        if bad:
            layer = model.encoder.layer[1]
            layer.intermediate.dense.weight[_OUTLIERS] *= 1e-5
            layer.intermediate.dense.bias[_OUTLIERS] *= 1e-5
            layer.output.dense.weight[:, _OUTLIERS] *= 1e4
    return model


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=200, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(4)
    return model


def token_ids(count: int = 4, length: int = 20, words: int = 200) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(4, words, (1, length), generator=generator)} for _ in range(count)]
