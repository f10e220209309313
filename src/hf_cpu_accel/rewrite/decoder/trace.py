"""The trace of one forward of a decoder layer: inputs and outputs of its linears, its attention and its cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_cpu_accel.rewrite.experts.layer import PackedExperts
from hf_cpu_accel.rewrite.linear.layer import PackedLinear


@dataclass(frozen=True)
class LinearCall:
    """activation(linear(input)) = output."""

    linear: PackedLinear
    input: Tensor
    output: Tensor
    activation: str


@dataclass(frozen=True)
class FFNCall:
    """down(activation(up(input))) = output, in one op."""

    up: PackedLinear
    down: PackedLinear
    activation: str
    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class ExpertsCall:
    """experts(input, index, weights) = output, all [B, L, ...]."""

    experts: PackedExperts
    input: Tensor
    index: Tensor
    weights: Tensor
    output: Tensor


OpCall = LinearCall | FFNCall | ExpertsCall


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention.

    Attributes:
        query: [B, heads, L, D].
        scale: factor of the scores, None for 1 / sqrt(D).
        bias: [1, heads, L, keys], added to the scores, or None.
        scores: [B, heads, L, keys], the input of softmax in a layer that computes its attention itself; scale and bias are
            included.
        window, softcap, sinks: as in `ops.decoder_layers.SelfAttention`.
        output: [B, L, heads, value_dim]; None in a layer that computes its attention itself.
    """

    query: Tensor
    scale: float | None
    bias: Tensor | None = None
    scores: Tensor | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    output: Tensor | None = None


@dataclass(frozen=True)
class Stored:
    """Key and value [B, kv_heads, L, D] that went into the cache as layer `layer_index`, None if another layer stored them."""

    key: Tensor
    value: Tensor
    layer_index: int | None


@dataclass
class DecoderTrace:
    """One forward, in which no position is rotated.

    Attributes:
        input, output: of the layer, [B, L, C].
        encoder: the encoder output for cross-attention, [B, encoder length, C], or None.
        rest: outputs of the layer after the first, None if it does not return a tuple.
        stages: the calls of packed linears and experts before anything went into the cache, after the first keys and after
            the second.
        stored: the contents of the cache, in order.
        attention: the attention calls.
        inputs: further arguments with values for each token, [B, L, ...], by name.
        keeps, takes: keys of a mapping among the arguments of layers, under which it stores its keys and values for later
            layers, and finds those of an earlier one, which then count as stored; else None.
        clips: whether it clamps the output of its first linears (OLMoE's clip_qkv), which few values show.
    """

    input: Tensor
    encoder: Tensor | None
    output: Tensor | None = None
    rest: tuple[Any, ...] | None = None
    stages: tuple[list[OpCall], ...] = field(default_factory=lambda: ([], [], []))
    stored: list[Stored] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    keeps: str | None = None
    takes: str | None = None
    clips: bool = False
