"""decoder_layers: a run of transformer decoder layers in one call, for prefill and for decoding token by token.

A decode step of a model with 16 layers is some 200 small operations, and a decode step of a small model takes a few milliseconds:
here they are steps of one call, between which the threads only meet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cpu_accel.ops.decoder.bind import BoundLayers, bind
from hf_cpu_accel.ops.decoder.parts import (
    CrossAttention,
    DecoderLayer,
    FeedForward,
    Gate,
    Heads,
    MixtureOfExperts,
    Norm,
    PerLayerInput,
    Projection,
    Recurrence,
    SelfAttention,
)
from hf_cpu_accel.ops.decoder.recurrence import projections_around
from hf_cpu_accel.ops.decoder.reference import SCHEMA, decoder_layers_reference
from hf_cpu_accel.ops.registry import declare, like_first

__all__ = [
    "BoundLayers",
    "CrossAttention",
    "DecoderLayer",
    "FeedForward",
    "Gate",
    "Heads",
    "MixtureOfExperts",
    "Norm",
    "PerLayerInput",
    "Projection",
    "Recurrence",
    "SelfAttention",
    "bind",
    "decoder_layers",
    "projections_around",
]


def decoder_layers(
    hidden_states: Tensor,
    layers: BoundLayers,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    past: Sequence[int],
    *,
    rotary: Sequence[tuple[Tensor, Tensor]] = (),
    start: Tensor | None = None,
    rows: Tensor | None = None,
    mask: Tensor | None = None,
    cross_keys: Sequence[Tensor] = (),
    cross_values: Sequence[Tensor] = (),
    cross_padding: Tensor | None = None,
    cross_rows: Tensor | None = None,
    per_layer_inputs: Sequence[Tensor] = (),
) -> Tensor:
    """Run the layers one after another, and write the new tokens' keys and values into the cache.

    Query i of a call stands at position past + i of its layer's storage and sees the positions up to its own (the last `window` of
    them). Layers may hold different numbers of tokens, if some forget what has left their window: positions in `start`, `rows` and
    `mask` are those of the layer that holds most, and the last position is the same token in all layers.

    Args:
        hidden_states: [B, q_len, C] float32 or bfloat16, any strides.
        layers: from `bind`.
        keys, values: per layer [B, kv_heads, capacity, head_dim] and [B, kv_heads, capacity, value_dim], float32 or bfloat16, or
            int8 with four more columns (ops/kv_cache.py); dense last dimension. Positions [past, past + q_len) are written.
            Of layers with a recurrence the two states, written in place; such layers take no padding and no rows. Layers that
            share keys take those of an earlier layer, with its `past`, and write nothing.
        past: per layer, tokens in its storage before the call.
        rotary: tables (cos, sin), each [1 or B, q_len, rotary_dim] float32 or bfloat16 as transformers' rotary modules return
            them, or [..., rotary_dim / 2], one column per frequency.
        start: int32 [B], each sequence's first token. Left padding before it is neither computed nor attended: its hidden states
            come out as zeros.
        rows: int32 [B, at least past], in which row of keys and values position t of sequence b lies: beams share what they have
            in common. New tokens of sequence b are written to row b.
        mask: bool (True = attend) or floating (added), [B or 1, heads or 1, q_len or 1, past + q_len], in addition to all that.
        cross_keys, cross_values: of layers with cross-attention, per layer [texts, kv_heads, length, head_dim] and
            [texts, kv_heads, length, value_dim], made of the encoder's output.
        cross_padding: bool [B, length], True where the encoder's output is a token's; None if all are.
        cross_rows: int32 [B], which of the texts each sequence looks at; None: sequence b at text b. Beams of one text that follow
            one another share the reading of its keys.
        per_layer_inputs: [B, q_len, I] float32 or bfloat16 with a dense last dimension, one for each layer that takes one.

    Returns:
        [B, q_len, C] contiguous, dtype of the input. In between, hidden states are float32.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check_inputs(hidden_states, layers, keys, values, past)
    longest = max(past)
    if len(rotary) < layers.rotary_tables:
        raise ValueError(
            f"rotary has {len(rotary)} tables: must be {layers.rotary_tables}, as the layers use"
        )
    if mask is not None and (mask.dim() != 4 or mask.shape[3] != longest + hidden_states.shape[1]):
        raise ValueError(
            f"mask of shape {tuple(mask.shape)}: must have four dimensions, the last {longest + hidden_states.shape[1]}"
        )
    wanted = len(layers) if layers.crosses else 0
    if not len(cross_keys) == len(cross_values) == wanted:
        raise ValueError(
            f"{len(cross_keys)} cross_keys and {len(cross_values)} cross_values: must be {wanted} each"
        )
    if len(per_layer_inputs) != layers.per_layer_inputs:
        raise ValueError(
            f"{len(per_layer_inputs)} per_layer_inputs: must be {layers.per_layer_inputs}, one per layer that uses one"
        )
    tables = [table for pair in rotary for table in pair]
    return torch.ops.hf_cpu_accel.decoder_layers(
        hidden_states,
        layers.weights,
        layers.vectors,
        layers.layout,
        layers.scalars,
        keys,
        values,
        past,
        tables,
        start,
        rows,
        mask,
        cross_keys,
        cross_values,
        cross_padding,
        cross_rows,
        per_layer_inputs,
    )


def _check_inputs(
    hidden_states: Tensor,
    layers: BoundLayers,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    past: Sequence[int],
) -> None:
    if hidden_states.dim() != 3 or hidden_states.shape[2] != layers.features:
        raise ValueError(
            f"hidden_states of shape {tuple(hidden_states.shape)}: must be [batch, q_len, {layers.features}]"
        )
    if not len(keys) == len(values) == len(past) == len(layers):
        raise ValueError(
            f"{len(keys)} keys, {len(values)} values and {len(past)} lengths: must be {len(layers)} each, one per layer"
        )


declare(SCHEMA, fake=like_first, reference=decoder_layers_reference)
