"""Parts of a decoder layer: the roles of its modules, and the constants in its code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_cpu_accel.ops.decoder.bind import LAYER_NORMS
from hf_cpu_accel.ops.decoder.layers import (
    CrossAttention,
    DecoderLayer,
    Gate,
    Heads,
    Norm,
    PerLayerInput,
    SelfAttention,
)
from hf_cpu_accel.rewrite.decoder.experts_parts import FeedForwardParts, MixtureParts
from hf_cpu_accel.rewrite.decoder.head_norms import HeadNormParts, NormPart
from hf_cpu_accel.rewrite.decoder.relative_bias import RelativeBias
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.linear_run import LinearRun

# Fields that the parts of a layer share with the op's `SelfAttention`.
_ALIKE = (
    *("heads", "kv_heads", "head_dim", "value_dim", "query", "key", "value", "scale"),
    *("window", "softcap", "alibi", "rotary_dim", "rotary_interleaved", "gate", "shares_keys"),
)


@dataclass(frozen=True)
class CrossParts:
    """Cross-attention; see `ops.decoder_layers.CrossAttention` for the fields.

    Attributes:
        key, value: paths of the linears that compute keys and values of the encoder's output, head after head.
        query, output: linears.
    """

    query: LinearRun
    key: str
    value: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    output: LinearRun

    def of(self, layer: nn.Module) -> CrossAttention:
        """Return the cross-attention with the current weights of `layer`."""
        query, output = self.query.projection(layer), self.output.projection(layer)
        return CrossAttention(
            query, self.heads, self.kv_heads, self.head_dim, self.value_dim, self.scale, output
        )

    def encode(self, layer: nn.Module, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [B, kv_heads, length, head_dim] and values [B, kv_heads, length, value_dim] of states [B, length, C]."""
        shape = (*states.shape[:2], self.kv_heads, -1)
        key, value = (_linear(layer, path)(states).view(shape) for path in (self.key, self.value))
        return key.transpose(1, 2), value.transpose(1, 2)


@dataclass(frozen=True)
class PerLayerParts:
    """The branch of the layer's own input; see `ops.decoder_layers.PerLayerInput`.

    Attributes:
        argument: the name of the argument with this input.
        gate, output: linears.
    """

    argument: str
    gate: LinearRun
    activation: str
    output: LinearRun
    post_norm: NormPart | None

    def of(self, layer: nn.Module) -> PerLayerInput:
        """Return the branch with the current weights of `layer`."""
        norm = None if self.post_norm is None else self.post_norm.norm(layer)
        gate, output = self.gate.projection(layer), self.output.projection(layer)
        return PerLayerInput(gate, self.activation, output, norm)


@dataclass(frozen=True)
class DecoderParts:
    """A layer as paths and numbers, from which `of` creates the arguments of the op; see `ops.decoder_layers` for the fields.

    Attributes:
        sinks: path of the parameter, if there is one.
        repeats: how often the original passes each head of keys and values to the cache.
        alibi: [heads], the amount subtracted from a score per token of distance, or None.
        hides: whether the layer itself hides later keys and those outside of its window, so that masks do not include windows.
        relative: the source of the bias of distances, if the layer has its own.
        qkv, output: linears.
        output_scale: the name of the buffer that multiplies its output, or None.
    """

    qkv: LinearRun
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    query: Heads
    key: Heads
    value: Heads
    scale: float
    output: LinearRun
    ffn: FeedForwardParts | MixtureParts | None
    window: int | None = None
    hides: bool = False
    softcap: float | None = None
    sinks: str | None = None
    alibi: Tensor | None = None
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    query_norm: NormPart | HeadNormParts | None = None
    key_norm: NormPart | HeadNormParts | None = None
    value_norm: NormPart | HeadNormParts | None = None
    sub_norm: NormPart | HeadNormParts | None = None
    shares_keys: bool = False
    gate: Gate | None = None
    attention_norm: NormPart | None = None
    ffn_norm: NormPart | None = None
    attention_post_norm: NormPart | None = None
    ffn_post_norm: NormPart | None = None
    attention_out_norm: NormPart | None = None
    ffn_out_norm: NormPart | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    relative: RelativeBias | None = None
    repeats: int = 1
    cross: CrossParts | None = None
    cross_norm: NormPart | None = None
    cross_out_norm: NormPart | None = None
    per_layer: PerLayerParts | None = None
    output_scale: str | None = None

    def of(self, layer: nn.Module, rotary: int = 0) -> DecoderLayer:
        """Return the layer with its current weights; `rotary` is the index of its tables in a call."""

        def norm(part: NormPart | HeadNormParts | None) -> Norm | None:
            return None if part is None else part.norm(layer)

        attention = SelfAttention(
            **{name: getattr(self, name) for name in _ALIKE},
            qkv=self.qkv.projection(layer),
            output=self.output.projection(layer),
            sinks=None if self.sinks is None else layer.get_parameter(self.sinks),
            relative=None if self.relative is None else self.relative.table(layer),
            rotary=rotary,
            query_norm=norm(self.query_norm),
            key_norm=norm(self.key_norm),
            value_norm=norm(self.value_norm),
            sub_norm=norm(self.sub_norm),
        )
        norms: dict[str, Any] = {name: norm(getattr(self, name)) for name in LAYER_NORMS}
        return DecoderLayer(
            attention=attention,
            ffn=None if self.ffn is None else self.ffn.of(layer),
            parallel=self.parallel,
            residual_scale=self.residual_scale,
            cross=None if self.cross is None else self.cross.of(layer),
            per_layer=None if self.per_layer is None else self.per_layer.of(layer),
            output_scale=1.0 if self.output_scale is None else layer.get_buffer(self.output_scale).item(),
            **norms,
        )

    @property
    def window_of_masks(self) -> int | None:
        """Return the window of the masks that the layer gets, or None."""
        return None if self.hides else self.window

    def linears(self, layer: nn.Module) -> tuple[PackedLinear, ...]:
        """Return the linears of a call, in this order."""
        crossing = () if self.cross is None else (self.cross.query, self.cross.output)
        own = () if self.per_layer is None else (self.per_layer.gate, self.per_layer.output)
        runs = (self.qkv, self.output, *crossing, *(() if self.ffn is None else self.ffn.runs()), *own)
        return tuple(linear for run in runs for linear in run.linears(layer))


def _linear(layer: nn.Module, path: str) -> PackedLinear:
    linear = layer.get_submodule(path)
    assert isinstance(linear, PackedLinear)
    return linear
