"""encoder_layer in plain torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.ops.attention import attention_reference
from hf_cpu_accel.ops.decoder.checks import NORM_KINDS
from hf_cpu_accel.ops.linear import ACTIVATIONS, linear_reference


def encoder_layer_reference(
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
    factors = (1.0 if scale is None else scale.float() for scale in (attention_gain, ffn_gain))
    attention_factor, ffn_factor = factors
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
    """x [B, heads, L, D] rotated by tables [1 or B, L, up to D], of which the first half counts."""
    half = cos.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _spanned(padding: Tensor) -> Tensor:
    """True from the first to the last token of each sequence: [B, L]."""
    after = padding.int().cummax(dim=1).values
    before = padding.int().flip(1).cummax(dim=1).values.flip(1)
    return (after & before).bool()
