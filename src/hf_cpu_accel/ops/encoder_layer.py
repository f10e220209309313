"""encoder_layer: a whole transformer encoder layer in one call (Vaswani et al. 2017, arXiv:1706.03762).

Six calls of the smaller ops would give the same; at 32 tokens of a small model, calling them, forking the threads for each and
carrying the values between them through memory takes as long as the arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.ops.attention import attention_reference
from hf_cpu_accel.ops.decoder.checks import NORM_KINDS
from hf_cpu_accel.ops.linear import ACTIVATIONS, check_activation, check_input, linear_reference
from hf_cpu_accel.ops.registry import declare
from hf_cpu_accel.packing.linear import PackedWeight


@dataclass(frozen=True)
class NormWeights:
    """weight and bias [features] or None (ones, zeros), and the eps of a norm as in ops/norm.py; rms_norm has no bias."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    kind: Literal["layer_norm", "rms_norm"] = "layer_norm"


@dataclass(frozen=True)
class EncoderWeights:
    """What a layer is made of. H features, A attention features (heads * head_size), I intermediate features.

    Attributes:
        qkv, qkv_bias: 3A x H, packed; query, key and value one after another, A a multiple of 32.
        order: at which place of them query, key and value are.
        attention_scale: factor of the attention scores, None for 1 / sqrt(head_size).
        output: H x A; up: I x H; down: H x I, packed.
        gated: up is 2I x H, first the features that go through the activation, then those that are multiplied into them (Shazeer
            2020, arXiv:2002.05202), I a multiple of 32.
        activation: one of `ops.linear.ACTIVATIONS`, after `up`.
        attention_norm: None if nothing is normalised before attention.
        norm_before: whether the norms come before attention and FFN, or after the residuals are added.
        narrow: hand query, key, value, the attended values and the FFN's intermediate on in bfloat16. What is then multiplied by
            bfloat16 or int8 weights is rounded as coarsely anyway. With int8 weights attention multiplies in integers, where the
            CPU has VNNI: scores in 8 bits, probabilities and values in 11 to 13.
        attention_gain, ffn_gain: [H], what the branches are multiplied by before they are added (LayerScale, Touvron et al. 2021,
            arXiv:2103.17239), or None; with `norm_before` only.
    """

    qkv: PackedWeight
    qkv_bias: Tensor | None
    order: tuple[int, int, int]
    head_size: int
    attention_scale: float | None
    output: PackedWeight
    output_bias: Tensor | None
    attention_norm: NormWeights | None
    up: PackedWeight
    up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    activation: str
    ffn_norm: NormWeights
    norm_before: bool
    narrow: bool = False
    gated: bool = False
    attention_gain: Tensor | None = None
    ffn_gain: Tensor | None = None

    def arguments(self) -> tuple[Any, ...]:
        """What follows the inputs of a call in the op's schema."""
        first, second = self.attention_norm or NormWeights(None, None, 0.0), self.ffn_norm
        kinds = [NORM_KINDS.index(norm.kind if norm else "none") for norm in (self.attention_norm, second)]
        return (
            *(self.qkv.data, self.qkv.scale, self.qkv_bias, list(self.order), self.head_size),
            *(self.attention_scale, self.output.data, self.output.scale, self.output_bias),
            *(first.weight, first.bias, first.eps),
            *(self.up.data, self.up.scale, self.up_bias, self.down.data, self.down.scale, self.down_bias),
            *(self.down.in_features, self.activation, second.weight, second.bias, second.eps),
            *(self.qkv.out_features // 3, self.norm_before, self.narrow),
            *(kinds, self.gated, self.attention_gain, self.ffn_gain),
        )


def encoder_layer(
    hidden_states: Tensor,
    weights: EncoderWeights,
    *,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
    relative: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """norm(y + ffn(y)) of y = norm(x + attention(x)); with `norm_before`, y + ffn(norm(y)) of y = x + attention(norm(x)), where
    both branches may have a gain.

    Args:
        hidden_states: [B, L, H] float32 or bfloat16.
        padding: bool [B, L], True where there is a token. Padding before the first and after the last token of a sequence is
            not computed at all: its hidden states come out as zeros.
        mask: besides `padding`, bool (True = attend) or floating (added), broadcastable to [B, heads, L, L] and of four dimensions.
        relative: float32 [heads, 2n + 1], what a score gains for the distance of its two tokens: the middle for a token and itself,
            before it for keys that stand before the query; beyond n tokens it stays the same (T5, Raffel et al. 2020,
            arXiv:1910.10683, section 2.1). Excludes a window.
        rotary: tables (cos, sin), each [1 or B, L, rotated features of a head] float32 or bfloat16 as transformers' rotary modules
            return them, for pairs of features half of them apart (Su et al. 2021, arXiv:2104.09864).
        window: how many tokens before and after itself a token attends to; None for all.
        rows: int32 [sequences, L'], for sequences whose tokens lie anywhere in the B * L rows of `hidden_states`, such as the
            windows of an image (Swin, Liu et al. 2021, arXiv:2103.14030): which row each token is; every row once. `mask` is then
            [M, heads or 1, L', L'], where sequence i has mask i % M. Excludes `padding` and `rotary`.

    Returns:
        [B, L, H] contiguous, dtype of the input. Sums are float32.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_input(hidden_states, weights.qkv)
    check_activation(weights.activation)
    if hidden_states.dim() != 3:
        raise ValueError(
            f"hidden_states of shape {tuple(hidden_states.shape)}: must be [batch, length, features]"
        )
    if padding is not None and padding.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"padding of shape {tuple(padding.shape)}: must be {tuple(hidden_states.shape[:2])}, [batch, length]"
        )
    cos, sin = (None, None) if rotary is None else rotary
    return torch.ops.hf_cpu_accel.encoder_layer(
        hidden_states, padding, mask, relative, cos, sin, window or 0, *weights.arguments(), rows
    )


def _reference(
    hidden_states: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    relative: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    window: int,
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
    norms: list[int],
    gated: bool,
    attention_gain: Tensor | None,
    ffn_gain: Tensor | None,
    rows: Tensor | None = None,
) -> Tensor:
    """The op in plain torch, float32 between the steps."""
    x = hidden_states.float()
    if rows is not None:
        x = x.flatten(0, 1)[rows.long()]
        mask = mask if mask is None else mask.repeat(len(rows) // len(mask), 1, 1, 1)
    length, features = x.shape[1:]
    mask = _scores_mask(padding, mask, relative, window, length)

    def norm(x: Tensor, kind: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        weight, bias = (None if part is None else part.float() for part in (weight, bias))
        if NORM_KINDS[kind] == "none":
            return x
        if NORM_KINDS[kind] == "rms_norm":
            return F.rms_norm(x, (features,), weight, eps)
        return F.layer_norm(x, (features,), weight, bias, eps)

    def attend(x: Tensor) -> Tensor:
        merged = linear_reference(x, qkv, qkv_scale, qkv_bias, None, 3 * attention_features, "none")
        parts = merged.unflatten(-1, (3, -1, head_size)).unbind(-3)
        query, key, value = (parts[place].transpose(1, 2) for place in order)
        scale = 1.0 / math.sqrt(head_size) if attention_scale is None else attention_scale
        if cos is not None and sin is not None:
            query, key = (_rotated(heads, cos.float(), sin.float()) for heads in (query, key))
        context = attention_reference(query, key, value, mask, False, scale)
        return linear_reference(
            context.flatten(-2), output, output_scale, output_bias, None, features, "none"
        )

    def feed_forward(x: Tensor) -> Tensor:
        width = 2 * intermediate_features if gated else intermediate_features
        inner = linear_reference(x, up, up_scale, up_bias, None, width, "none")
        if gated:
            inner, factor = inner.chunk(2, dim=-1)
            inner = ACTIVATIONS[activation](inner) * factor
        else:
            inner = ACTIVATIONS[activation](inner)
        return linear_reference(inner, down, down_scale, down_bias, None, features, "none")

    first = (norms[0], attention_norm_weight, attention_norm_bias, attention_norm_eps)
    second = (norms[1], ffn_norm_weight, ffn_norm_bias, ffn_norm_eps)
    gains = (1.0 if gain is None else gain.float() for gain in (attention_gain, ffn_gain))
    attention_factor, ffn_factor = gains
    if padding is not None:
        x = x.masked_fill(~_spanned(padding)[..., None], 0.0)  # whatever is there does not reach the rest
    if norm_before:
        x = x + attention_factor * attend(norm(x, *first))
        x = x + ffn_factor * feed_forward(norm(x, *second))
    else:
        x = norm(x + attend(x), *first)
        x = norm(x + feed_forward(x), *second)
    if padding is not None:
        x = x.masked_fill(~_spanned(padding)[..., None], 0.0)
    if rows is not None:
        x = torch.empty_like(x).flatten(0, 1).index_copy(0, rows.flatten().long(), x.flatten(0, 1))
    return x.view(hidden_states.shape).to(hidden_states.dtype).contiguous()


def _scores_mask(
    padding: Tensor | None, mask: Tensor | None, relative: Tensor | None, window: int, length: int
) -> Tensor | None:
    """Everything that is added to scores or hides them, as float32 [B or 1, heads or 1, L or 1, L]."""
    parts: list[Tensor] = []
    hidden = torch.zeros(())
    distance = torch.arange(length) - torch.arange(length)[:, None]
    if padding is not None:
        parts.append(hidden.masked_fill(~padding[:, None, None], -torch.inf))
    if mask is not None:
        parts.append(hidden.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else mask.float())
    if window:
        parts.append(hidden.masked_fill(distance[None, None].abs() > window, -torch.inf))
    if relative is not None:
        farthest = relative.shape[1] // 2
        parts.append(relative[:, distance.clamp(-farthest, farthest) + farthest][None])
    return sum(parts[1:], parts[0]) if parts else None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, L, D] turned by tables [1 or B, L, up to D], of which the first half counts."""
    half = cos.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _spanned(padding: Tensor) -> Tensor:
    """True from the first to the last token of each sequence: [B, L]."""
    after = padding.int().cummax(dim=1).values
    before = padding.int().flip(1).cummax(dim=1).values.flip(1)
    return (after & before).bool()


def _fake(hidden_states: Tensor, *arguments: Any) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape)


declare(
    "encoder_layer(Tensor hidden_states, Tensor? padding, Tensor? mask, Tensor? relative, Tensor? cos, Tensor? sin, "
    "int window, Tensor qkv, Tensor? qkv_scale, Tensor? qkv_bias, "
    "int[] order, int head_size, float? attention_scale, Tensor output, Tensor? output_scale, Tensor? output_bias, "
    "Tensor? attention_norm_weight, Tensor? attention_norm_bias, float attention_norm_eps, Tensor up, Tensor? up_scale, "
    "Tensor? up_bias, Tensor down, Tensor? down_scale, Tensor? down_bias, int intermediate_features, str activation, "
    "Tensor? ffn_norm_weight, Tensor? ffn_norm_bias, float ffn_norm_eps, int attention_features, bool norm_before, bool narrow, "
    "int[] norms, bool gated, Tensor? attention_gain, Tensor? ffn_gain, Tensor? rows=None) -> Tensor",
    fake=_fake,
    reference=_reference,
)
