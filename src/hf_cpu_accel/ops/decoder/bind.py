"""Flattening of consecutive layers into the arguments of `decoder_layers`.

The op is called once per token, so arguments that do not change between calls are collected once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.abi import (
    ACTIVATIONS,
    GATE_ACTIVATIONS,
    NORM_KINDS,
    NORM_SCOPES,
    SCORINGS,
    HeadsLayout,
    LayerLayout,
    LayerScalars,
    NormLayout,
    ProjectionLayout,
    RecurrenceLayout,
    columns,
    numbers,
    read,
)
from hf_cpu_accel.ops.decoder.checks import check_layer
from hf_cpu_accel.ops.decoder.parts import (
    DecoderLayer,
    Heads,
    MixtureOfExperts,
    Norm,
    PerLayerInput,
    Projection,
)
from hf_cpu_accel.ops.decoder.recurrence import layout_of

# The norms among the fields of `DecoderLayer`.
LAYER_NORMS = (
    *("attention_norm", "attention_post_norm", "attention_out_norm"),
    *("cross_norm", "cross_out_norm"),
    *("ffn_norm", "ffn_post_norm", "ffn_out_norm"),
)
_NO_RECURRENCE = read(RecurrenceLayout, [0] * len(columns(RecurrenceLayout)))


@dataclass(frozen=True)
class BoundLayers:
    """The arguments of the op for consecutive layers, from `bind`.

    Attributes:
        weights: the packed weights of all layers and their scales.
        vectors: float32, all biases and norm weights in one tensor, since passing a tensor takes a quarter of a microsecond.
        layout: int64 [layers, numbers of a LayerLayout].
        scalars: float64 [layers, numbers of a LayerScalars].
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
    """Collects the weights and vectors of layers, and their rows of `layout` and `scalars`."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.vectors: list[Tensor] = []
        self.elements = 0
        self.per_layer_inputs = 0
        self.layout: list[tuple[int, ...]] = []
        self.scalars: list[tuple[float, ...]] = []

    def add_layer(self, layer: DecoderLayer) -> None:
        attention, cross, recurrence, extra = layer.attention, layer.cross, layer.recurrence, layer.per_layer
        mixture = layer.ffn if isinstance(layer.ffn, MixtureOfExperts) else None
        ffn = mixture.shared if mixture else layer.ffn
        assert not isinstance(ffn, MixtureOfExperts)
        relative = attention.relative
        head_norms = {
            "query_norm": attention.query_norm,
            "key_norm": attention.key_norm,
            "value_norm": attention.value_norm,
            "attention_sub_norm": attention.sub_norm,
        }
        norms: dict[str, Norm | None] = {
            **{name: getattr(layer, name) for name in LAYER_NORMS},
            "per_layer_post_norm": extra.post_norm if extra else None,
            **head_norms,
            "ffn_sub_norm": ffn.sub_norm if ffn else None,
        }
        dims = {"query_norm": attention.head_dim, "key_norm": attention.head_dim}
        groups: dict[str, Any] = {
            **{name: self._norm(norm) for name, norm in norms.items()},
            **{
                f"{name}_scope": _scope(norm, dims.get(name, attention.value_dim))
                for name, norm in head_norms.items()
            },
            **self._mixture(mixture),
            **self._per_layer(extra),
        }
        layout = LayerLayout(
            qkv=self._projection(attention.qkv),
            output=self._projection(attention.output),
            cross_query=self._projection(cross.query if cross else None),
            cross_output=self._projection(cross.output if cross else None),
            up=self._projection(ffn.up if ffn else None),
            down=self._projection(ffn.down if ffn else None),
            sinks=self._vector(attention.sinks),
            alibi=self._vector(attention.alibi),
            relative=self._vector(None if relative is None else relative.flip(1)),
            relative_count=0 if relative is None else relative.shape[1],
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            value_dim=attention.value_dim,
            query=_heads(attention.query),
            key=_heads(attention.key),
            value=_heads(attention.value),
            gate=_heads(attention.gate.heads if attention.gate else Heads(0, 0)),
            gate_dim=attention.gate.dim if attention.gate else 0,
            gate_activation=GATE_ACTIVATIONS.index(attention.gate.activation if attention.gate else "none"),
            cross_heads=cross.heads if cross else 0,
            cross_kv_heads=cross.kv_heads if cross else 0,
            cross_head_dim=cross.head_dim if cross else 0,
            cross_value_dim=cross.value_dim if cross else 0,
            window=attention.window or 0,
            rotary=attention.rotary,
            rotary_dim=attention.rotary_dim,
            rotary_interleaved=int(attention.rotary_interleaved),
            shares_keys=int(attention.shares_keys),
            qkv_features=attention.qkv.weight.out_features,
            intermediate_features=ffn.down.weight.in_features if ffn else 0,
            gated=int(ffn.gated) if ffn else 0,
            activation=ACTIVATIONS.index(ffn.activation) if ffn else 0,
            parallel=int(layer.parallel),
            recurrence=layout_of(recurrence, self._vector, self._projection)
            if recurrence
            else _NO_RECURRENCE,
            **groups,
        )
        scalars = LayerScalars(
            scale=attention.scale,
            cross_scale=cross.scale if cross else 0.0,
            softcap=attention.softcap or 0.0,
            residual_scale=layer.residual_scale,
            output_scale=layer.output_scale,
            experts_limit=mixture.experts.limit if mixture else 0.0,
            experts_scale=mixture.scale if mixture else 0.0,
            recurrence_norm_eps=recurrence.norm_eps if recurrence else 0.0,
            **{f"{name}_eps": norm.eps if norm else 0.0 for name, norm in norms.items()},
        )
        self.layout.append(numbers(layout))
        self.scalars.append(numbers(scalars))

    def _per_layer(self, extra: PerLayerInput | None) -> dict[str, Any]:
        """Return the fields of a per-layer input; inputs are numbered in the order of the layers that have one."""
        if extra is not None:
            self.per_layer_inputs += 1
        return {
            "per_layer_gate": self._projection(extra.gate if extra else None),
            "per_layer_output": self._projection(extra.output if extra else None),
            "per_layer_input": self.per_layer_inputs - 1 if extra else -1,
            "per_layer_features": extra.gate.weight.out_features if extra else 0,
            "per_layer_activation": ACTIVATIONS.index(extra.activation) if extra else 0,
        }

    def _mixture(self, mixture: MixtureOfExperts | None) -> dict[str, Any]:
        """Return the fields of a mixture of experts, except those of its shared expert."""
        experts = mixture.experts if mixture else None
        return {
            "router": self._projection(mixture.router if mixture else None),
            "experts_up": self._projection(Projection(experts.up, experts.up_bias) if experts else None),
            "experts_down": self._projection(
                Projection(experts.down, experts.down_bias) if experts else None
            ),
            "experts": experts.experts if experts else 0,
            "top_k": mixture.top_k if mixture else 0,
            "expert_features": experts.intermediate_features if experts else 0,
            "experts_gated": int(experts.gated) if experts else 0,
            "experts_activation": ACTIVATIONS.index(experts.activation) if experts else 0,
            "scoring": SCORINGS.index(mixture.scoring) if mixture else 0,
            "choice_bias": self._vector(mixture.choice_bias if mixture else None),
            "renormalize": int(mixture.renormalize) if mixture else 0,
            "shared_gate": int(mixture.shared_gate) if mixture else 0,
        }

    def _projection(self, projection: Projection | None) -> ProjectionLayout:
        weight = projection.weight if projection else None
        return ProjectionLayout(
            weight=self._weight(weight.data if weight else None),
            scale=self._weight(weight.scale if weight else None),
            bias=self._vector(projection.bias if projection else None),
        )

    def _norm(self, norm: Norm | None) -> NormLayout:
        return NormLayout(
            kind=NORM_KINDS.index(norm.kind if norm else "none"),
            weight=self._vector(norm.weight if norm else None),
            bias=self._vector(norm.bias if norm else None),
        )

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


def _heads(heads: Heads) -> HeadsLayout:
    return HeadsLayout(first=heads.first, stride=heads.group_stride, head_stride=heads.head_stride)


def _scope(norm: Norm | None, head_dim: int) -> int:
    vector = None if norm is None else norm.bias if norm.weight is None else norm.weight
    if vector is None or vector.shape == (head_dim,):
        return NORM_SCOPES.index("head")
    return NORM_SCOPES.index("all heads" if vector.dim() == 1 else "head with its own weights")
