"""Small models whose layers get inputs with large and small directions, as trained ones do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

WORDS = 160
_SIZES = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def model(name: str) -> Any:
    torch.manual_seed(0)
    if name == "llama":
        made: nn.Module = LlamaModel(LlamaConfig(**_SIZES, intermediate_size=96))
    elif name == "bert":
        made = BertModel(BertConfig(**_SIZES, intermediate_size=128), add_pooling_layer=False)
    else:
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
        made = GPT2Model(GPT2Config(vocab_size=WORDS, **sizes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in made.named_parameters():
            if path.endswith(("word_embeddings.weight", "embed_tokens.weight", "wte.weight")):
                mixing = torch.randn(64, 64, generator=generator) / 8
                spread = torch.randn(WORDS, 64, generator=generator) * torch.logspace(0.5, -1.5, 64)
                parameter.copy_(spread @ mixing)
            elif parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return made.eval()


def ids(seed: int, rows: int = 4, length: int = 32) -> Tensor:
    return torch.randint(1, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def calls(count: int = 4) -> list[dict[str, Tensor]]:
    return [{"input_ids": ids(seed)} for seed in range(count)]


def answer(model: Any, seed: int = 99) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(ids(seed)).last_hidden_state
    return output
