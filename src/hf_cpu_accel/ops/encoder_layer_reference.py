"""The reference of encoder_layer in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.abi import NORM_KINDS
from hf_cpu_accel.ops.attention import attention_reference
from hf_cpu_accel.ops.linear import ACTIVATIONS, linear_reference
from hf_cpu_accel.ops.registry import by_name

INPUTS = (
    "Tensor hidden_states, Tensor? padding, Tensor? mask, Tensor? relative, Tensor? cos, Tensor? sin, int window, "
    "Tensor? position_keys, Tensor? position_queries, Tensor? position_index"
)
WEIGHTS = (
    "Tensor qkv, Tensor? qkv_scale, Tensor? qkv_bias, "
    "int[] order, int head_size, float? attention_scale, Tensor output, Tensor? output_scale, Tensor? output_bias, "
    "Tensor? attention_norm_weight, Tensor? attention_norm_bias, float attention_norm_eps, Tensor up, Tensor? up_scale, "
    "Tensor? up_bias, Tensor down, Tensor? down_scale, Tensor? down_bias, int intermediate_features, str activation, "
    "Tensor? ffn_norm_weight, Tensor? ffn_norm_bias, float ffn_norm_eps, int attention_features, bool norm_before, bool narrow, "
    "int[] norms, bool gated, Tensor? attention_gain, Tensor? ffn_gain"
)
SCHEMA = f"encoder_layer({INPUTS}, {WEIGHTS}, Tensor? rows=None) -> Tensor"


@by_name(SCHEMA)
def encoder_layer_reference(given: Any) -> Tensor:
    """Compute the op in PyTorch, with float32 between the steps."""
    x, mask, rows, padding = given.hidden_states.float(), given.mask, given.rows, given.padding
    if rows is not None:
        x = x.flatten(0, 1)[rows.long()]
        mask = mask if mask is None else mask.repeat(len(rows) // len(mask), 1, 1, 1)
    length, features = x.shape[1:]
    mask = _scores_mask(padding, mask, given.relative, given.window, length)

    def norm(x: Tensor, name: str, kind: int) -> Tensor:
        weight, bias, eps = (getattr(given, f"{name}_{part}") for part in ("weight", "bias", "eps"))
        weight, bias = (None if part is None else part.float() for part in (weight, bias))
        if NORM_KINDS[kind] == "none":
            return x
        if NORM_KINDS[kind] == "rms_norm":
            return F.rms_norm(x, (features,), weight, eps)
        return F.layer_norm(x, (features,), weight, bias, eps)

    def project(x: Tensor, name: str, out_features: int) -> Tensor:
        weight, scale, bias = (getattr(given, name + part) for part in ("", "_scale", "_bias"))
        return linear_reference(x, weight, scale, bias, None, out_features, "none")

    def attend(x: Tensor) -> Tensor:
        parts = project(x, "qkv", 3 * given.attention_features).unflatten(-1, (3, -1, given.head_size))
        query, key, value = (parts.unbind(-3)[place].transpose(1, 2) for place in given.order)
        if given.cos is not None and given.sin is not None:
            query, key = (_rotated(heads, given.cos.float(), given.sin.float()) for heads in (query, key))
        gained = _position_scores(given, query, key)
        added = mask if gained is None else gained if mask is None else mask + gained
        context = attention_reference(query, key, value, added, False, given.attention_scale)
        return project(context.flatten(-2), "output", features)

    def feed_forward(x: Tensor) -> Tensor:
        width = given.intermediate_features
        inner = project(x, "up", 2 * width if given.gated else width)
        inner, *factor = inner.chunk(2, dim=-1) if given.gated else (inner,)
        inner = ACTIVATIONS[given.activation](inner)
        return project(inner * factor[0] if given.gated else inner, "down", features)

    first, second = zip(("attention_norm", "ffn_norm"), given.norms, strict=True)
    factors = (given.attention_gain, given.ffn_gain)
    attention_factor, ffn_factor = (1.0 if scale is None else scale.float() for scale in factors)
    if padding is not None:
        x = x.masked_fill(~_spanned(padding)[..., None], 0.0)  # whatever is there does not reach the rest
    if given.norm_before:
        x = x + attention_factor * attend(norm(x, *first))
        x = x + ffn_factor * feed_forward(norm(x, *second))
    else:
        x = norm(x + attend(x), *first)
        x = norm(x + feed_forward(x), *second)
    if padding is not None:
        x = x.masked_fill(~_spanned(padding)[..., None], 0.0)
    if rows is not None:
        x = torch.empty_like(x).flatten(0, 1).index_copy(0, rows.flatten().long(), x.flatten(0, 1))
    return x.view(given.hidden_states.shape).to(given.hidden_states.dtype).contiguous()


def _scores_mask(
    padding: Tensor | None, mask: Tensor | None, relative: Tensor | None, window: int, length: int
) -> Tensor | None:
    """Return all masks and biases of the scores, as float32 [B or 1, heads or 1, L or 1, L]."""
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


def _position_scores(given: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the part of the scores [B, heads, L, L] from relative positions, or None."""
    if given.position_index is None:
        return None
    heads, length, head_size = query.shape[1:]
    position = torch.arange(length)
    rows = given.position_index.long()[position[:, None] - position + length - 1]
    gained = torch.zeros(*query.shape[:3], length)

    def products(x: Tensor, table: Tensor) -> Tensor:
        return x @ table.float().unflatten(1, (heads, head_size)).permute(1, 2, 0)

    if given.position_keys is not None:
        gained += products(query, given.position_keys).gather(3, rows.expand_as(gained))
    if given.position_queries is not None:
        gained += products(key, given.position_queries).gather(3, rows.T.expand_as(gained)).mT
    scale = given.attention_scale
    return gained * (head_size**-0.5 if scale is None else scale)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, heads, L, D] by tables [1 or B, L, up to D], whose first half is used."""
    half = cos.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _spanned(padding: Tensor) -> Tensor:
    """Return a mask [B, L] that is True from the first to the last token of each sequence."""
    after = padding.int().cummax(dim=1).values
    before = padding.int().flip(1).cummax(dim=1).values.flip(1)
    return (after & before).bool()
