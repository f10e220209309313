"""Weights, positions and masks of a case, and what the reference of `encoder_layer` gives for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.encoder_layer import EncoderInputs, EncoderWeights, NormWeights, RelativePositions
from hf_cpu_accel.ops.encoder_layer_reference import encoder_layer_reference
from hf_cpu_accel.packing.linear import pack_linear
from tests.ops.encoder.cases import Case


def weights_of(case: Case) -> EncoderWeights:
    inner = case.heads * case.head_size

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns) / columns**0.5

    def vector(size: int) -> Tensor | None:
        return (0.1 * torch.randn(size)).to(case.dtype) if case.biases else None

    def norm(eps: float, kind: Any) -> NormWeights:
        if not case.biases and kind == "layer_norm":
            return NormWeights(None, None, eps)
        weight = (1 + 0.1 * torch.randn(case.features)).to(case.dtype)
        return NormWeights(weight, vector(case.features) if kind == "layer_norm" else None, eps, kind)

    up = 2 * case.intermediate if case.gated else case.intermediate
    last = "rms_norm" if case.norm == "rms_norm" else "layer_norm"

    return EncoderWeights(
        qkv=pack_linear(matrix(3 * inner, case.features), case.weights),
        qkv_bias=vector(3 * inner),
        qkv_order=case.qkv_order,
        head_size=case.head_size,
        attention_scale=None if case.biases else 0.3,
        output=pack_linear(matrix(case.features, inner), case.weights),
        output_bias=vector(case.features),
        attention_norm=None if case.norm == "none" else norm(1e-12, case.norm),
        up=pack_linear(matrix(up, case.features), case.weights),
        up_bias=vector(up),
        down=pack_linear(matrix(case.features, case.intermediate), case.weights),
        down_bias=vector(case.features),
        activation=case.activation,
        ffn_norm=norm(1e-5, last),
        pre_norm=case.pre_norm,
        bf16_intermediates=case.bf16_intermediates,
        gated=case.gated,
        attention_layer_scale=torch.randn(case.features).to(case.dtype) if case.layer_scale else None,
        ffn_layer_scale=torch.randn(case.features).to(case.dtype) if case.layer_scale else None,
    )


def positions_of(case: Case) -> dict[str, Any]:
    """relative, rotary, window and rows."""
    relative = torch.randn(case.heads, 2 * case.relative + 1) if case.relative else None
    angles = torch.randn(1 if case.batch % 2 else case.batch, case.length, case.rotary // 2).repeat(1, 1, 2)
    tables = (angles.cos().to(case.dtype), angles.sin().to(case.dtype)) if case.rotary else None
    rows = None
    if case.scattered:
        rows = torch.randperm(case.batch * case.length, dtype=torch.int32).view(-1, case.scattered)
    positions = _relative_positions(case) if case.positions else None
    return {
        "relative": relative,
        "rotary": tables,
        "window": case.window,
        "positions": positions,
        "rows": rows,
    }


def _relative_positions(case: Case) -> RelativePositions:
    """Vectors in float32 or bfloat16, fewer than distances, which share some."""
    count, length = case.length // 2 + 3, case.scattered or case.length
    dtype = torch.bfloat16 if case.bf16_intermediates and case.batch % 2 else case.dtype

    def table(name: str) -> Tensor | None:
        return torch.randn(count, case.heads * case.head_size).to(dtype) if name in case.positions else None

    return RelativePositions(
        table("keys"), table("queries"), torch.randint(0, count, (2 * length - 1,), dtype=torch.int32)
    )


def reference(
    hidden_states: Tensor,
    weights: EncoderWeights,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
    relative: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    positions: RelativePositions | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    cos, sin = rotary or (None, None)
    inputs = EncoderInputs(padding, mask, relative, cos, sin, window or 0, *(positions or ()))
    return encoder_layer_reference(hidden_states, *inputs, *weights.arguments(), rows)


def masks_of(case: Case) -> tuple[Tensor | None, Tensor | None]:
    """padding and mask."""
    batch, length = case.batch, case.length
    position, lengths = torch.arange(length), torch.randint(1, length + 1, (batch, 1))
    if case.mask == "float per head, padded":
        return position < lengths, torch.randn(1, case.heads, length, length)
    if case.mask == "bool per query, holes":
        return torch.rand(batch, length) < 0.6, torch.rand(batch, 1, length, length) < 0.7
    if case.mask == "bfloat16 keys, holes":
        return torch.rand(batch, length) < 0.6, torch.randn(batch, case.heads, 1, length).bfloat16()
    if case.mask == "right padding":
        return position < lengths, None
    if case.mask == "left padding":
        return position >= length - lengths, None
    if case.mask == "holes":
        return torch.rand(batch, length) < 0.6, None
    if case.mask == "one sequence empty":
        padding = position < lengths
        padding[-1] = False
        return padding, None
    if case.mask == "all empty":
        return torch.zeros(batch, length, dtype=torch.bool), None
    if case.mask == "bool keys":
        return None, (position < lengths)[:, None, None]
    if case.mask == "bool per query":
        return None, torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    if case.mask == "float per head":
        return None, torch.randn(1, case.heads, length, length)
    if case.mask == "bfloat16 keys":
        return None, torch.randn(batch, 1, 1, length).bfloat16()
    if case.mask == "windows":
        return None, torch.randn(length // case.scattered, case.heads, case.scattered, case.scattered)
    if case.mask == "window":
        return None, torch.randn(1, case.heads, case.scattered, case.scattered)
    return None, None
