"""encoder_layer: a whole transformer encoder layer in one call (Vaswani et al. 2017, arXiv:1706.03762).

Six calls of the smaller ops would give the same; at 32 tokens of a small model, calling them, forking the threads for each and
carrying the values between them through memory takes as long as the arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packing import PackedWeight
from .attention import attention_reference
from .ffn import ffn_reference
from .linear import check_activation, check_input, linear_reference
from .registry import declare


@dataclass(frozen=True)
class NormWeights:
    """weight and bias [features] or None (ones, zeros), and the eps of a layer norm."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class EncoderWeights:
    """What a layer is made of. H features, A attention features (heads * head_size), I intermediate features.

    Attributes:
        qkv, qkv_bias: 3A x H, packed; query, key and value one after another, A a multiple of 32.
        order: at which place of them query, key and value are.
        attention_scale: factor of the attention scores, None for 1 / sqrt(head_size).
        output: H x A; up: I x H; down: H x I, packed.
        activation: one of `ops.linear.ACTIVATIONS`, after `up`.
        norm_before: whether the norms come before attention and FFN, or after the residuals are added.
        narrow: hand query, key, value, the attended values and the FFN's intermediate on in bfloat16. What is then multiplied by
            bfloat16 or int8 weights is rounded as coarsely anyway. With int8 weights attention multiplies in integers, where the
            CPU has VNNI: scores in 8 bits, probabilities and values in 11 to 13.
    """

    qkv: PackedWeight
    qkv_bias: Tensor | None
    order: tuple[int, int, int]
    head_size: int
    attention_scale: float | None
    output: PackedWeight
    output_bias: Tensor | None
    attention_norm: NormWeights
    up: PackedWeight
    up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    activation: str
    ffn_norm: NormWeights
    norm_before: bool
    narrow: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """What follows hidden_states, padding and mask in the op's schema."""
        first, second = self.attention_norm, self.ffn_norm
        return (
            *(self.qkv.data, self.qkv.scale, self.qkv_bias, list(self.order), self.head_size),
            *(self.attention_scale, self.output.data, self.output.scale, self.output_bias),
            *(first.weight, first.bias, first.eps),
            *(self.up.data, self.up.scale, self.up_bias, self.down.data, self.down.scale, self.down_bias),
            *(self.up.out_features, self.activation, second.weight, second.bias, second.eps),
            *(self.qkv.out_features // 3, self.norm_before, self.narrow),
        )


def encoder_layer(
    hidden_states: Tensor,
    weights: EncoderWeights,
    *,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """norm(y + ffn(y)) of y = norm(x + attention(x)); with `norm_before`, y + ffn(norm(y)) of y = x + attention(norm(x)).

    Args:
        hidden_states: [B, L, H] float32 or bfloat16.
        padding: bool [B, L], True where there is a token. Padding before the first and after the last token of a sequence is
            not computed at all: its hidden states come out as zeros.
        mask: instead of `padding`, bool (True = attend) or floating (added), broadcastable to [B, heads, L, L] and of four
            dimensions; all positions are computed.

    Returns:
        [B, L, H] contiguous, dtype of the input. Sums are float32.

    Raises:
        ValueError: if the shapes do not fit, or both padding and mask are given.
    """
    check_input(hidden_states, weights.qkv)
    check_activation(weights.activation)
    if hidden_states.dim() != 3:
        raise ValueError(
            f"hidden_states of shape {tuple(hidden_states.shape)}: must be [batch, length, features]"
        )
    if padding is not None and mask is not None:
        raise ValueError("padding and mask exclude each other: fold the padding into the mask")
    if padding is not None and padding.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"padding of shape {tuple(padding.shape)}: must be {tuple(hidden_states.shape[:2])}, [batch, length]"
        )
    return torch.ops.hf_cpu_accel.encoder_layer(hidden_states, padding, mask, *weights.arguments())


def _reference(
    hidden_states: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    qkv: Tensor,
    qkv_scale: Tensor | None,
    qkv_bias: Tensor | None,
    order: list[int],
    head_size: int,
    attention_scale: float | None,
    output: Tensor,
    output_scale: Tensor | None,
    output_bias: Tensor | None,
    attention_norm_weight: Tensor | None,
    attention_norm_bias: Tensor | None,
    attention_norm_eps: float,
    up: Tensor,
    up_scale: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor | None,
    intermediate_features: int,
    activation: str,
    ffn_norm_weight: Tensor | None,
    ffn_norm_bias: Tensor | None,
    ffn_norm_eps: float,
    attention_features: int,
    norm_before: bool,
    narrow: bool,
) -> Tensor:
    """The op in plain torch, float32 between the steps."""

    def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        weight, bias = (None if part is None else part.float() for part in (weight, bias))
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def attend(x: Tensor, residual: Tensor) -> Tensor:
        merged = linear_reference(x, qkv, qkv_scale, qkv_bias, None, 3 * attention_features, "none")
        parts = merged.unflatten(-1, (3, -1, head_size)).unbind(-3)
        query, key, value = (parts[place].transpose(1, 2) for place in order)
        scale = 1.0 / math.sqrt(head_size) if attention_scale is None else attention_scale
        context = attention_reference(query, key, value, padding if mask is None else mask, False, scale)
        return linear_reference(
            context.flatten(-2), output, output_scale, output_bias, residual, x.shape[-1], "none"
        )

    first = (attention_norm_weight, attention_norm_bias, attention_norm_eps)
    second = (ffn_norm_weight, ffn_norm_bias, ffn_norm_eps)
    ffn_weights = (up, up_scale, up_bias, down, down_scale, down_bias)
    features = hidden_states.shape[-1]
    x = hidden_states.float()
    if padding is not None:
        x = x.masked_fill(~_spanned(padding)[..., None], 0.0)  # whatever is there does not reach the rest
    if norm_before:
        x = attend(norm(x, *first), x)
        x = ffn_reference(norm(x, *second), *ffn_weights, x, intermediate_features, features, activation)
    else:
        x = norm(attend(x, x), *first)
        x = ffn_reference(x, *ffn_weights, x, intermediate_features, features, activation)
        x = norm(x, *second)
    if padding is not None:
        x = x.masked_fill(~_spanned(padding)[..., None], 0.0)
    return x.to(hidden_states.dtype).contiguous()


def _spanned(padding: Tensor) -> Tensor:
    """True from the first to the last token of each sequence: [B, L]."""
    after = padding.int().cummax(dim=1).values
    before = padding.int().flip(1).cummax(dim=1).values.flip(1)
    return (after & before).bool()


def _fake(hidden_states: Tensor, *arguments: Any) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape)


declare(
    "encoder_layer(Tensor hidden_states, Tensor? padding, Tensor? mask, Tensor qkv, Tensor? qkv_scale, Tensor? qkv_bias, "
    "int[] order, int head_size, float? attention_scale, Tensor output, Tensor? output_scale, Tensor? output_bias, "
    "Tensor? attention_norm_weight, Tensor? attention_norm_bias, float attention_norm_eps, Tensor up, Tensor? up_scale, "
    "Tensor? up_bias, Tensor down, Tensor? down_scale, Tensor? down_bias, int intermediate_features, str activation, "
    "Tensor? ffn_norm_weight, Tensor? ffn_norm_bias, float ffn_norm_eps, int attention_features, bool norm_before, bool narrow) "
    "-> Tensor",
    fake=_fake,
    reference=_reference,
)
