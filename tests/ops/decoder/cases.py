"""Decoder layers and calls for the tests of decoder_layers: every option that a family has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_cpu_accel.ops.decoder.layers import (
    CrossAttention,
    DecoderLayer,
    FeedForward,
    Gate,
    Heads,
    MixtureOfExperts,
    Norm,
    PerLayerInput,
    Projection,
    SelfAttention,
)
from hf_cpu_accel.ops.experts import ExpertWeights
from hf_cpu_accel.packing.linear import pack_linear, pack_stack


@dataclass(frozen=True)
class Case:
    batch: int = 2
    q_len: int = 1
    past: int = 11
    features: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    intermediate: int = 96
    layers: int = 2
    weights: str = "float32"
    dtype: torch.dtype = torch.float32
    cache: torch.dtype = torch.float32
    norm: str = "rms_norm"
    norms: str = "before"
    head_norm: str = "none"
    interleaved_heads: bool = False
    biases: bool = False
    gated: bool = True
    activation: str = "silu"
    parallel: bool = False
    residual_scale: float = 1.0
    window: int | None = None
    forget: bool = False
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    relative: int = 0
    rotary_dim: int = 16
    rotary_interleaved: bool = False
    half_tables: bool = False
    start: bool = False
    rows: bool = False
    mask: str = "none"
    cross: str = "none"
    experts: str = "none"
    gate: str = "none"
    sub_norm: str = "none"
    ffn: bool = True
    value_norm: str = "none"
    shares_keys: bool = False
    per_layer: int = 0
    output_scale: float = 1.0

    def __str__(self) -> str:
        plain = Case()
        changed = {k: v for k, v in vars(self).items() if v != getattr(plain, k)}
        return "-".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in changed.items()) or "plain"


NORMS = ["before", "before and post", "post", "out", "none"]
HEAD_NORMS = ["none", "shared", "own", "all"]
VALUE_NORMS = [*HEAD_NORMS, "bare"]
CROSSES = ["none", "all", "padding", "holes", "beams", "beams, padding"]
EXPERTS = ["none", "softmax", "renormalized", "sigmoid", "shared", "gated shared"]
GATES = ["none", "sigmoid", "softplus", "beside", "head", "softplus head"]
SHARING = 2  # layers from this one on may share keys with the one that is so many before
MASKS = ["none", "bool", "float per head", "bfloat16 keys"]


def layers_of(case: Case) -> list[DecoderLayer]:
    key = case.kv_heads * case.head_dim
    value, group = case.kv_heads * case.value_dim, case.heads // case.kv_heads

    def projection(rows: int, columns: int) -> Projection:
        bias = 0.1 * torch.randn(rows) if case.biases else None
        return Projection(pack_linear(torch.randn(rows, columns) / columns**0.5, case.weights), bias)

    def norm(*shape: int, on: bool = True, eps: float = 1e-5) -> Norm | None:
        if not on:
            return None
        weight = (1 + 0.1 * torch.randn(shape)).to(case.dtype)
        bias = 0.1 * torch.randn(shape) if case.norm == "layer_norm" else None
        return Norm(case.norm, weight, bias, eps)

    def head_norm(kind: str, heads: int, dim: int) -> Norm | None:
        if kind == "bare":
            return Norm(case.norm, None, None, 1e-5)
        shapes = {"shared": (dim,), "own": (heads, dim), "all": (heads * dim,)}
        return norm(*shapes[kind]) if kind in shapes else None

    # Beside its query a head of a gate, or all of them at the end.
    gate_dim = 1 if "head" in case.gate else case.value_dim
    beside = gate_dim if case.gate == "beside" else 0
    step = case.head_dim + beside
    if case.interleaved_heads:
        stride = group * step + case.head_dim + case.value_dim
        places = (Heads(0, stride, step), Heads(group * step, stride))
        places = (*places, Heads(group * step + case.head_dim, stride))
    else:
        stride, first = group * step, case.heads * step
        places = (Heads(0, stride, step), Heads(first, case.head_dim))
        places = (*places, Heads(first + key, case.value_dim))
    merged = case.heads * step + key + value

    def gate() -> Gate | None:
        if case.gate == "none":
            return None
        activation = "softplus" if "softplus" in case.gate else "sigmoid"
        heads = Heads(case.head_dim, stride, step) if beside else Heads(merged, group * gate_dim, gate_dim)
        return Gate(heads, gate_dim, activation)

    def cross() -> CrossAttention | None:
        if case.cross == "none":
            return None
        return CrossAttention(
            projection(6 * 8, case.features), 6, 3, 8, 12, 0.4, projection(case.features, 6 * 12)
        )

    def dense() -> FeedForward:
        return FeedForward(
            projection((1 + case.gated) * case.intermediate, case.features),
            case.gated,
            case.activation,
            projection(case.features, case.intermediate),
            norm(case.intermediate, on=case.sub_norm != "none" and case.experts == "none"),
        )

    def per_layer() -> PerLayerInput:
        return PerLayerInput(
            projection(case.per_layer, case.features),
            case.activation,
            projection(case.features, case.per_layer),
            # A branch of one feature may be next to nothing, of which a norm with a small eps would make anything.
            norm(case.features, on="post" in case.norms, eps=0.1),
        )

    def layer(number: int) -> DecoderLayer:
        before, post = "before" in case.norms, "post" in case.norms
        out = case.norms == "out" and not case.parallel
        is_dense, has_ffn = case.experts == "none" or number % 3 == 2, case.ffn or number % 3 == 0
        ffn = None if not has_ffn else dense() if is_dense else mixture_of(case, dense())
        return DecoderLayer(
            SelfAttention(
                projection(
                    merged + (case.heads * gate_dim if case.gate != "none" and not beside else 0),
                    case.features,
                ),
                *(case.heads, case.kv_heads, case.head_dim, case.value_dim),
                *places,
                scale=case.head_dim**-0.5,
                output=projection(case.features, case.heads * case.value_dim),
                window=case.window if number % 2 == 0 else None,
                softcap=case.softcap,
                sinks=torch.randn(case.heads) if case.sinks else None,
                alibi=torch.rand(case.heads) if case.alibi else None,
                relative=torch.randn(case.heads, case.relative) if case.relative else None,
                rotary_dim=case.rotary_dim,
                rotary_interleaved=case.rotary_interleaved,
                query_norm=head_norm(case.head_norm, case.heads, case.head_dim),
                key_norm=head_norm(case.head_norm, case.kv_heads, case.head_dim),
                sub_norm=head_norm(case.sub_norm, case.heads, case.value_dim),
                gate=gate(),
                value_norm=head_norm(case.value_norm, case.kv_heads, case.value_dim),
                shares_keys=case.shares_keys and number >= SHARING,
            ),
            ffn,
            attention_norm=norm(case.features, on=before),
            ffn_norm=norm(case.features, on=before and ffn is not None),
            attention_post_norm=norm(case.features, on=post),
            ffn_post_norm=norm(case.features, on=post and ffn is not None),
            attention_out_norm=norm(case.features, on=out),
            ffn_out_norm=norm(case.features, on=out and ffn is not None),
            parallel=case.parallel and ffn is not None,
            residual_scale=case.residual_scale,
            cross=cross(),
            cross_norm=norm(case.features, on=before and case.cross != "none"),
            cross_out_norm=norm(case.features, on=out and case.cross != "none"),
            per_layer=per_layer() if case.per_layer and ffn is not None and number != 1 else None,
            output_scale=1.0 if ffn is None or out else case.output_scale,
        )

    return [layer(number) for number in range(case.layers)]


def mixture_of(case: Case, shared: FeedForward) -> MixtureOfExperts:
    count, width, features = 7, 32, case.features

    def stack(rows: int, columns: int) -> Projection:
        weight = pack_stack(torch.randn(count, rows, columns) / columns**0.5, count, case.weights)
        return Projection(weight, 0.1 * torch.randn(count * rows) if case.biases else None)

    up, down = stack(2 * width, features), stack(features, width)
    router = torch.randn(count + (case.experts == "gated shared"), features) / features**0.5
    return MixtureOfExperts(
        Projection(pack_linear(router, "float32"), None),
        ExpertWeights(count, up.weight, up.bias, down.weight, down.bias, case.activation),
        3,
        scoring="sigmoid" if case.experts == "sigmoid" else "softmax",
        choice_bias=torch.rand(count) if case.experts == "sigmoid" else None,
        renormalize=case.experts in ("renormalized", "sigmoid"),
        scale=2.5 if case.experts == "sigmoid" else 1.0,
        shared=shared if "shared" in case.experts else None,
        shared_gate=case.experts == "gated shared",
    )
