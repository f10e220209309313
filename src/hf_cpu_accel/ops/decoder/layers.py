"""decoder_layers: consecutive transformer decoder layers in one call, for prefill and decode.

A decode step of a model with 16 layers is about 200 small operations, and takes a few milliseconds for a small model. Here they are
steps of one call, with a thread barrier between them.
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
    """Run consecutive decoder layers, and write the keys and values of the new tokens into the KV cache.

    Query i of a call is at position past + i of its layer's storage and attends to the positions up to its own (the last `window`
    of them). Layers may store different numbers of tokens if some drop tokens outside of their window. Positions in `start`, `rows`
    and `mask` are those of the layer with the most tokens, and the last position is the same token in all layers.

    Args:
        hidden_states: [B, q_len, C] float32 or bfloat16, any strides.
        layers: from `bind`.
        keys, values: per layer [B, kv_heads, capacity, head_dim] and [B, kv_heads, capacity, value_dim], float32 or bfloat16, or
            int8 with four more columns (ops/kv_cache.py); dense last dimension. Positions [past, past + q_len) are written.
            For layers with a recurrence, the two states, updated in place; such layers support neither padding nor rows. Layers
            that share keys get those of an earlier layer, with its `past`, and write nothing.
        past: the number of tokens in the storage of each layer before the call.
        rotary: tables (cos, sin), each [1 or B, q_len, rotary_dim] float32 or bfloat16 as returned by transformers' rotary modules,
            or [..., rotary_dim / 2], one column per frequency.
        start: int32 [B], the first token of each sequence. Left padding before it is neither computed nor attended: its hidden
            states are zeros.
        rows: int32 [B, at least past], the row of keys and values of position t of sequence b, so that beams share common tokens.
            New tokens of sequence b are written to row b.
        mask: bool (True = attend) or floating (added), [B or 1, heads or 1, q_len or 1, past + q_len], in addition to the above.
        cross_keys, cross_values: for layers with cross-attention, per layer [texts, kv_heads, length, head_dim] and
            [texts, kv_heads, length, value_dim], computed from the encoder's output.
        cross_padding: bool [B, length], True at tokens of the encoder's output; None if there is no padding.
        cross_rows: int32 [B], the text of each sequence; None for text b of sequence b. Consecutive beams of one text share the
            reading of its keys.
        per_layer_inputs: [B, q_len, I] float32 or bfloat16 with a dense last dimension, one per layer that has one.

    Returns:
        [B, q_len, C] contiguous, dtype of the input. Between layers, hidden states are float32.

    Raises:
        ValueError: the number of tensors or the shapes of hidden_states or mask do not fit.
        RuntimeError: other shapes or dtypes do not fit, or an index is out of range.
    """
    _check_inputs(hidden_states, layers, keys, values, past)
    longest = max(past)
    if len(rotary) < layers.rotary_tables:
        raise ValueError(
            f"rotary has {len(rotary)} tables: must be at least {layers.rotary_tables}, as many as the layers use"
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
