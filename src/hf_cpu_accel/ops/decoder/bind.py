"""Flattening of consecutive layers into the arguments of `decoder_layers`.

The op is called once per token, so arguments that do not change between calls are collected once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_cpu_accel.ops.decoder.checks import GATES, NORM_KINDS, SCORINGS, check_layer
from hf_cpu_accel.ops.decoder.parts import (
    DecoderLayer,
    Heads,
    MixtureOfExperts,
    Norm,
    PerLayerInput,
    Projection,
)
from hf_cpu_accel.ops.decoder.recurrence import RECURRENCE, RECURRENCE_PROJECTIONS, integers_of
from hf_cpu_accel.ops.linear import ACTIVATIONS

NORM_SCOPES = ("head", "head with its own weights", "all heads")
HEADS = ("query", "key", "value", "gate")
PROJECTIONS = (
    *("qkv", "output", "cross_query", "cross_output", "up", "down"),
    *("router", "experts_up", "experts_down", "per_layer_gate", "per_layer_output"),
)
LAYER_NORMS = (
    *("attention_norm", "attention_post_norm", "attention_out_norm"),
    *("cross_norm", "cross_out_norm"),
    *("ffn_norm", "ffn_post_norm", "ffn_out_norm"),
)
HEAD_NORMS = ("query_norm", "key_norm", "value_norm", "attention_sub_norm")
NORMS = (*LAYER_NORMS, "per_layer_post_norm", *HEAD_NORMS, "ffn_sub_norm")

# The columns of `layout`, which has a row per layer (csrc/decoder/layout.h reads it). Packed weights and scales are indices of
# `weights`, vectors are their first element in `vectors`, -1 for none. 0 cross_heads: no cross-attention. 0 experts: no mixture. up
# and down of a mixture are those of its shared expert.
LAYOUT = (
    *(f"{name}{part}" for name in PROJECTIONS for part in ("", "_scale", "_bias")),
    *(f"{name}{part}" for name in NORMS for part in ("_kind", "_weight", "_bias")),
    *(f"{name}_scope" for name in HEAD_NORMS),
    *("sinks", "alibi", "relative", "relative_count"),
    *("heads", "kv_heads", "head_dim", "value_dim"),
    *(f"{name}_{part}" for name in HEADS for part in ("first", "stride", "head_stride")),
    *("gate_dim", "gate_activation"),
    *("cross_heads", "cross_kv_heads", "cross_head_dim", "cross_value_dim"),
    *("window", "rotary", "rotary_dim", "rotary_interleaved", "shares_keys"),
    *("qkv_features", "intermediate_features", "gated", "activation", "parallel"),
    *("experts", "top_k", "expert_features", "experts_gated", "experts_activation"),
    *("scoring", "choice_bias", "renormalize", "shared_gate"),
    *("per_layer_input", "per_layer_features", "per_layer_activation"),
    *RECURRENCE,
)
# The columns of `scalars`. A softcap of 0 means none.
SCALARS = (
    *(f"{name}_eps" for name in NORMS),
    *(
        "scale",
        "cross_scale",
        "softcap",
        "residual_scale",
        "output_scale",
        "experts_limit",
        "experts_scale",
        "recurrence_norm_eps",
    ),
)


@dataclass(frozen=True)
class BoundLayers:
    """The arguments of the op for consecutive layers, from `bind`.

    Attributes:
        weights: the packed weights of all layers and their scales.
        vectors: float32, all biases and norm weights in one tensor, since passing a tensor takes a quarter of a microsecond.
        layout: int64 [layers, len(LAYOUT)].
        scalars: float64 [layers, len(SCALARS)].
        features: C, the features of the hidden states.
        cache_heads: (kv_heads, head_dim, value_dim) of the keys and values of each layer.
        crosses: whether the layers attend to an encoder's output.
        rotary_tables: the number of tables that the layers use.
        per_layer_inputs: the number of layers with a per-layer input.
    """

    weights: list[Tensor]
    vectors: Tensor
    layout: Tensor
    scalars: Tensor
    features: int
    cache_heads: tuple[tuple[int, int, int], ...]
    crosses: bool
    rotary_tables: int
    per_layer_inputs: int

    def __len__(self) -> int:
        return len(self.cache_heads)


def bind(layers: Sequence[DecoderLayer]) -> BoundLayers:
    """Collect the arguments of `decoder_layers` for consecutive layers.

    Raises:
        ValueError: the parts of a layer, or the layers, do not fit.
    """
    if not layers:
        raise ValueError("layers=[]: at least one layer is required")
    features = layers[0].attention.qkv.weight.in_features
    crosses = layers[0].cross is not None
    if any((layer.cross is not None) != crosses for layer in layers):
        raise ValueError(
            "layers with and without cross-attention cannot be bound together; bind them separately"
        )
    builder = _Builder()
    for number, layer in enumerate(layers):
        try:
            check_layer(layer, features)
        except ValueError as error:
            raise ValueError(f"layer {number}: {error}") from None
        builder.add_layer(layer)
    parts = [layer.attention for layer in layers]
    return BoundLayers(
        builder.weights,
        torch.cat(builder.vectors) if builder.vectors else torch.empty(0),
        torch.tensor(builder.layout, dtype=torch.int64),
        torch.tensor(builder.scalars, dtype=torch.float64),
        features,
        tuple((part.kv_heads, part.head_dim, part.value_dim) for part in parts),
        crosses,
        max((part.rotary + 1 for part in parts if part.rotary_dim), default=0),
        builder.per_layer_inputs,
    )


class _Builder:
    """Collects the weights and vectors of layers, and their rows of LAYOUT and SCALARS."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.vectors: list[Tensor] = []
        self.elements = 0
        self.per_layer_inputs = 0
        self.layout: list[list[int]] = []
        self.scalars: list[list[float]] = []

    def add_layer(self, layer: DecoderLayer) -> None:
        attention, cross, recurrence, extra = layer.attention, layer.cross, layer.recurrence, layer.per_layer
        mixture = layer.ffn if isinstance(layer.ffn, MixtureOfExperts) else None
        ffn = mixture.shared if mixture else layer.ffn
        assert not isinstance(ffn, MixtureOfExperts)
        experts = mixture.experts if mixture else None
        projections = {
            "qkv": attention.qkv,
            "output": attention.output,
            **({"up": ffn.up, "down": ffn.down} if ffn else {}),
            **(
                {
                    "router": mixture.router,
                    "experts_up": Projection(experts.up, experts.up_bias),
                    "experts_down": Projection(experts.down, experts.down_bias),
                }
                if mixture and experts
                else {}
            ),
            **({"cross_query": cross.query, "cross_output": cross.output} if cross else {}),
            **({"per_layer_gate": extra.gate, "per_layer_output": extra.output} if extra else {}),
            **{f"recurrence_{name}": getattr(recurrence, name, None) for name in RECURRENCE_PROJECTIONS},
        }
        integers = {
            **{name: getattr(attention, name) for name in ("heads", "kv_heads", "head_dim", "value_dim")},
            **{
                f"cross_{name}": getattr(cross, name, 0)
                for name in ("heads", "kv_heads", "head_dim", "value_dim")
            },
            "sinks": self._vector(attention.sinks),
            "alibi": self._vector(attention.alibi),
            "relative": self._vector(None if attention.relative is None else attention.relative.flip(1)),
            "relative_count": 0 if attention.relative is None else attention.relative.shape[1],
            "window": attention.window or 0,
            "rotary": attention.rotary,
            "rotary_dim": attention.rotary_dim,
            "rotary_interleaved": int(attention.rotary_interleaved),
            "qkv_features": attention.qkv.weight.out_features,
            "intermediate_features": ffn.down.weight.in_features if ffn else 0,
            "gated": int(ffn.gated) if ffn else 0,
            "activation": list(ACTIVATIONS).index(ffn.activation) if ffn else 0,
            "parallel": int(layer.parallel),
            "gate_dim": attention.gate.dim if attention.gate else 0,
            "gate_activation": GATES.index(attention.gate.activation if attention.gate else "none"),
            "shares_keys": int(attention.shares_keys),
            **self._mixture(mixture),
            **self._per_layer(extra),
            **(integers_of(recurrence, self._vector) if recurrence else dict.fromkeys(RECURRENCE, 0)),
        }
        floats = {
            "scale": attention.scale,
            "cross_scale": cross.scale if cross else 0.0,
            "softcap": attention.softcap or 0.0,
            "residual_scale": layer.residual_scale,
            "output_scale": layer.output_scale,
            "experts_limit": experts.limit if experts else 0.0,
            "experts_scale": mixture.scale if mixture else 0.0,
            "recurrence_norm_eps": recurrence.norm_eps if recurrence else 0.0,
        }
        for name in (*PROJECTIONS, *(f"recurrence_{part}" for part in RECURRENCE_PROJECTIONS)):
            projection = projections.get(name)
            integers[name] = self._weight(projection.weight.data if projection else None)
            integers[f"{name}_scale"] = self._weight(projection.weight.scale if projection else None)
            integers[f"{name}_bias"] = self._vector(projection.bias if projection else None)
        norms = {
            **{name: getattr(layer, name) for name in LAYER_NORMS},
            "per_layer_post_norm": extra.post_norm if extra else None,
            "query_norm": attention.query_norm,
            "key_norm": attention.key_norm,
            "value_norm": attention.value_norm,
            "attention_sub_norm": attention.sub_norm,
            "ffn_sub_norm": ffn.sub_norm if ffn else None,
        }
        for name in NORMS:
            norm: Norm | None = norms[name]
            integers[f"{name}_kind"] = NORM_KINDS.index(norm.kind if norm else "none")
            integers[f"{name}_weight"] = self._vector(norm.weight if norm else None)
            integers[f"{name}_bias"] = self._vector(norm.bias if norm else None)
            floats[f"{name}_eps"] = norm.eps if norm else 0.0
        for name in HEAD_NORMS:
            of_values = name in ("value_norm", "attention_sub_norm")
            dim = attention.value_dim if of_values else attention.head_dim
            integers[f"{name}_scope"] = _scope(norms[name], dim)
        gate = attention.gate.heads if attention.gate else Heads(0, 0)
        places = (attention.query, attention.key, attention.value, gate)
        for name, heads in zip(HEADS, places, strict=True):
            integers |= {f"{name}_first": heads.first, f"{name}_stride": heads.group_stride}
            integers[f"{name}_head_stride"] = heads.head_stride
        self.layout.append([integers[name] for name in LAYOUT])
        self.scalars.append([floats[name] for name in SCALARS])

    def _per_layer(self, extra: PerLayerInput | None) -> dict[str, int]:
        """Return the integers of a per-layer input; inputs are numbered in the order of the layers that have one."""
        if extra is None:
            return {"per_layer_input": -1, "per_layer_features": 0, "per_layer_activation": 0}
        self.per_layer_inputs += 1
        return {
            "per_layer_input": self.per_layer_inputs - 1,
            "per_layer_features": extra.gate.weight.out_features,
            "per_layer_activation": list(ACTIVATIONS).index(extra.activation),
        }

    def _mixture(self, mixture: MixtureOfExperts | None) -> dict[str, int]:
        names = ("experts", "top_k", "expert_features", "experts_gated", "experts_activation", "scoring")
        if mixture is None:
            return {**dict.fromkeys((*names, "renormalize", "shared_gate"), 0), "choice_bias": -1}
        experts = mixture.experts
        activation, scoring = list(ACTIVATIONS).index(experts.activation), SCORINGS.index(mixture.scoring)
        sizes = (experts.experts, mixture.top_k, experts.intermediate_features, int(experts.gated))
        return {
            **dict(zip(names, (*sizes, activation, scoring), strict=True)),
            "choice_bias": self._vector(mixture.choice_bias),
            "renormalize": int(mixture.renormalize),
            "shared_gate": int(mixture.shared_gate),
        }

    def _weight(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return -1
        self.weights.append(tensor.detach())
        return len(self.weights) - 1

    def _vector(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return -1
        first = self.elements
        self.vectors.append(tensor.detach().float().flatten())
        self.elements += tensor.numel()
        return first


def _scope(norm: Norm | None, head_dim: int) -> int:
    vector = None if norm is None else norm.bias if norm.weight is None else norm.weight
    if vector is None or vector.shape == (head_dim,):
        return NORM_SCOPES.index("head")
    return NORM_SCOPES.index("all heads" if vector.dim() == 1 else "head with its own weights")
