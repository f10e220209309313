"""The parts of an encoder layer: the roles of its modules, and its signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.ops.encoder_layer import EncoderWeights, NormWeights
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.rewrite.encoder.call_form import BATCH, CallForm
from hf_cpu_accel.rewrite.encoder.trace import AttentionCall
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.norm.match import NormSpec

NormPart = tuple[nn.Module, NormSpec]

MASK, BIAS = "attention_mask", "position_bias"
CAUSAL = "is_causal"  # passed on to attention


@dataclass(frozen=True)
class EncoderLayerParts:
    """The parts of one layer, all of them modules and parameters in it.

    Attributes:
        attention: the call of attention; query, key and value are side by side in one packed weight.
        up: one linear, or those of the gate and of its factor, side by side in this order.
        gated: see `ops.encoder_layer.EncoderWeights`.
        pre_norm: whether the norms come before attention and FFN, or after the residual sums.
        layer_scale: parameters that multiply the branches, or None: one for each feature, or one for all (Mllama).
        bounded_scale: whether their tanh multiplies the branches.
        relative: the table of the layer's own position bias, or None; see `DistanceBias`.
    """

    attention: AttentionCall
    scale: float
    output: PackedLinear
    attention_norm: NormPart | None
    up: tuple[PackedLinear, ...]
    down: PackedLinear
    ffn_norm: NormPart
    activation: str
    gated: bool
    pre_norm: bool
    layer_scale: tuple[nn.Parameter, nn.Parameter] | None = None
    bounded_scale: bool = False
    relative: Tensor | None = None

    @property
    def projections(self) -> tuple[PackedLinear, ...]:
        """Return the projections of query, key and value, in this order; one may be all of them."""
        call = self.attention
        made = (call.query.linear, call.key.linear, call.value.linear)
        return tuple(dict.fromkeys(made))

    @cached_property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Return the linears in the order in which they are called."""
        return (*self.projections, self.output, *self.up, self.down)

    def moved(
        self, to: Callable[[Any], Any], layer_scale: tuple[nn.Parameter, nn.Parameter] | None
    ) -> EncoderLayerParts:
        """Return the same parts of another layer: `to` maps modules of this one to its modules.

        Args:
            layer_scale: the other layer's, used if this one has any.
        """
        call = self.attention
        made = [replace(part, linear=to(part.linear)) for part in (call.query, call.key, call.value)]
        first, second = self.attention_norm, self.ffn_norm
        return replace(
            self,
            attention=replace(call, query=made[0], key=made[1], value=made[2]),
            output=to(self.output),
            attention_norm=None if first is None else (to(first[0]), first[1]),
            up=tuple(to(linear) for linear in self.up),
            down=to(self.down),
            ffn_norm=(to(second[0]), second[1]),
            layer_scale=None if self.layer_scale is None else layer_scale,
        )

    def _computes_in_float32(self) -> bool:
        """Return whether a linear computes in float32, so that its input must not be rounded."""
        return any(linear.packed_dtype == "float32" for linear in self.linears)

    def _gain(self, parameter: nn.Parameter | None) -> Tensor | None:
        """Return the factor of a branch, [H], or None."""
        if parameter is None:
            return None
        gain = parameter.detach().tanh() if self.bounded_scale else parameter.detach()
        return gain.expand(self.down.out_features).contiguous()

    def weights(self, *, bf16_intermediates: bool) -> EncoderWeights:
        """Return the packed weights, with the three projections side by side; see `EncoderWeights` for `bf16_intermediates`."""
        call = self.attention
        offsets = (call.query.offset, call.key.offset, call.value.offset)
        width, first = call.heads * call.head_size, min(offsets)
        qkv, qkv_bias = side_by_side(self.projections)
        up, up_bias = side_by_side(self.up)
        attention_scale, ffn_scale = map(self._gain, self.layer_scale or (None, None))
        return EncoderWeights(
            qkv=qkv,
            qkv_bias=qkv_bias,
            qkv_order=tuple((offset - first) // width for offset in offsets),  # type: ignore[arg-type]
            head_size=call.head_size,
            attention_scale=self.scale,
            output=self.output.packed,
            output_bias=self.output.bias,
            attention_norm=None if self.attention_norm is None else _norm_weights(self.attention_norm),
            up=up,
            up_bias=up_bias,
            down=self.down.packed,
            down_bias=self.down.bias,
            activation=self.activation,
            ffn_norm=_norm_weights(self.ffn_norm),
            pre_norm=self.pre_norm,
            bf16_intermediates=bf16_intermediates and not self._computes_in_float32(),
            gated=self.gated,
            attention_layer_scale=attention_scale,
            ffn_layer_scale=ffn_scale,
        )


@dataclass(frozen=True)
class EncoderSignature:
    """The arguments and outputs of a layer.

    Attributes:
        names: of the parameters of its forward after hidden_states, in their order.
        rotates: whether it rotates queries and keys by tables among its arguments.
        prefix_tokens: whether tables for fewer positions rotate the last ones, and not those before them (class tokens).
        boolean_masks: whether it accepts boolean masks; it accepts additive masks in any case.
        ignored: names of arguments that hosts pass and that have no effect.
        form: the shapes of hidden states and tables.
        causal: whether tokens do not attend to later ones without a mask.
        told_causal: whether that is so if `is_causal` is True.
        rest: its outputs after the hidden states, "bias" being that of its attention; None if it does not return a tuple.
    """

    names: tuple[str, ...]
    rotates: bool = False
    prefix_tokens: bool = False
    boolean_masks: bool = True
    ignored: frozenset[str] = frozenset()
    form: CallForm = BATCH
    causal: bool = False
    told_causal: bool = False
    rest: tuple[Literal["bias"] | None, ...] | None = None

    def returned(self, hidden_states: Tensor, bias: Any) -> Any:
        """Return the outputs of the layer for these."""
        if self.rest is None:
            return hidden_states
        return (hidden_states, *(bias if kind == "bias" else None for kind in self.rest))


def lengthen_tables(tables: tuple[Tensor, ...], length: int) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) [1 or batch, positions, head_size] for at least `length` positions: those added in front do not rotate."""
    cos, sin = tables
    front = (0, 0, max(0, length - cos.shape[1]), 0)
    return functional.pad(cos, front, value=1.0), functional.pad(sin, front)


def side_by_side(linears: tuple[PackedLinear, ...]) -> tuple[PackedWeight, Tensor | None]:
    """Return the packed weight and the bias of members of one group."""
    indices = [linear.index for linear in linears]
    return linears[0].group.weight(min(indices), max(indices))


def are_adjacent(linears: tuple[PackedLinear, ...]) -> bool:
    """Return whether these are all members of one group from the first to the last."""
    indices = sorted(linear.index for linear in linears)
    one_group = all(linear.group is linears[0].group for linear in linears)
    return one_group and indices == list(range(indices[0], indices[-1] + 1))


def _norm_weights(part: NormPart) -> NormWeights:
    module, spec = part
    assert spec.kind in ("layer_norm", "rms_norm")
    scale = spec.scale(module._parameters.get("weight"))
    return NormWeights(scale, module._parameters.get("bias"), spec.eps, spec.kind)  # type: ignore[arg-type]
