"""A short prompt for a decoder, with a cache and padding: tokens, or hidden states if it has no token embedding."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.hosts.arguments import cache_argument, parameters_of
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign

ENCODER, ENCODER_MASK = "encoder_hidden_states", "encoder_attention_mask"
# Few enough rows that providers are not measured.
_PROMPT, PADDING = 4, 2
_ENCODED, _ENCODED_PADDING = (
    5,
    2,
)  # tokens of the encoder's output, and how many are padding in the second sequence
_EMBEDDED = "inputs_embeds"  # the alternative to tokens


def prompt_for(owner: Any, width: int, *, crosses: bool) -> dict[str, Any]:
    """Return arguments for the forward of `owner`, from its config; any error is raised.

    Args:
        width: features of its layers' hidden states.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    padding = torch.ones(2, _PROMPT, dtype=torch.long)
    padding[0, :PADDING] = 0
    cache: Any = DynamicCache(config=owner.config)
    names = parameters_of(owner.forward)
    encoded: dict[str, Tensor] = {}
    if crosses:
        cache = EncoderDecoderCache(cache, DynamicCache(config=owner.config))
        encoded = _encoded(owner)
    return {
        **_tokens(owner, width, names),
        "attention_mask": padding,
        cache_argument(owner.forward) or "past_key_values": cache,
        "use_cache": True,
        **encoded,
    }


def _encoded(owner: Any) -> dict[str, Tensor]:
    """Return a random encoder output, by the names of the owner's arguments."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, _ENCODED, owner.config.hidden_size, generator=generator).to(owner.dtype)
    if ENCODER_MASK not in parameters_of(owner.forward):
        return {ENCODER: states}
    padding = torch.ones(2, _ENCODED, dtype=torch.long)
    padding[1, -_ENCODED_PADDING:] = 0
    return {ENCODER: states, ENCODER_MASK: padding}


def _tokens(owner: Any, width: int, names: Container[str]) -> dict[str, Tensor]:
    """Return ids for a token embedding, or embeddings [2, tokens, width] without one."""
    count = getattr(call_foreign(lambda: owner.get_input_embeddings()), "num_embeddings", None)
    if count is not None or _EMBEDDED not in names:
        count = owner.get_input_embeddings().num_embeddings
        return {"input_ids": torch.arange(2 * _PROMPT).view(2, _PROMPT) % count}
    dtype = next((p.dtype for p in owner.parameters() if p.is_floating_point()), torch.float32)
    states = torch.randn(2, _PROMPT, width, generator=torch.Generator().manual_seed(0))
    return {_EMBEDDED: states.to(dtype)}
