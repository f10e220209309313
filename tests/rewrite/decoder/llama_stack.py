"""A stack of Llama layers and its outputs, with and without a cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from tests.rewrite.decoder.decoder_families import DECODERS, padded

BATCH = padded()["full"]


def llama(layers: int = 5) -> nn.Module:
    family = DECODERS["llama"]
    return type(family)("Llama", {**family.settings, "num_hidden_layers": layers}).build()


def accelerated(model: nn.Module) -> nn.Module:
    return accelerate_for_cpu(model, dtype="float32")


@torch.no_grad()
def logits(model: nn.Module, cache: object = None, **options: object) -> Tensor:
    return model(**BATCH, past_key_values=cache, use_cache=cache is not None, **options).logits
