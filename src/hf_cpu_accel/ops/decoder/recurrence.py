"""What a decoder layer with a recurrent state has in the place of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hf_cpu_accel.ops.decoder.parts import Heads, Projection, SelfAttention
from hf_cpu_accel.ops.recurrent.gated_delta_net import gated_delta_net_reference
from hf_cpu_accel.ops.recurrent.short_convolution import short_convolution_reference
from hf_cpu_accel.ops.recurrent.state_space import state_space_reference

if TYPE_CHECKING:
    from hf_cpu_accel.ops.decoder.reference_arguments import LayerArguments

KINDS = ("none", "short_convolution", "gated_delta_net", "state_space")

_PLACES = ("conv_input", "conv_gate", "gate", "decay", "beta")
_SIZES = ("heads", "key_heads", "key_dim", "value_dim")
_VECTORS = ("conv_weight", "conv_bias", "A_log", "dt_bias", "D", "norm_weight")

# Columns of `bind.LAYOUT`, in the order of RecurrenceLayout of csrc/decoder/layout.h; all 0 where the layer attends.
RECURRENCE = tuple(
    f"recurrence_{name}"
    for name in (
        *("kind", "channels", "taps", "conv_weight", "conv_bias", *_PLACES, *_SIZES),
        *("A_log", "dt_bias", "D", "norm_weight", "norm_groups", "gate_first"),
        *("rest", "rest_scale", "rest_bias", "rest_features"),
    )
)


@dataclass(frozen=True)
class Recurrence:
    """One of the ops of `ops/recurrent`, over what two projections give: the `qkv` of the layer's attention, whose `output` is its
    last projection and which says nothing else then, and `rest`. Its states stand for keys and values: conv_state
    [B, channels, taps] and state [B, heads, D, E], of a state space [B, heads, E, D], of a short convolution anything.

    Attributes:
        op: its name.
        rest: of the hidden states, too; its features are counted on behind those of `qkv`. None for none.
        conv_input, conv_gate, gate, decay, beta: the features at which these begin; conv_gate is what a short convolution
            multiplies its input with, decay a state space's dt.
        conv_weight: [channels, 1, taps]; conv_bias: [channels] or None.
        heads, key_heads, key_dim, value_dim: H, those of queries and keys (of a state space, groups of B and C), D and E.
        A_log, dt_bias, D: [heads], or None where the op takes none.
        norm_weight: as the op takes it.
    """

    op: Literal["short_convolution", "gated_delta_net", "state_space"]
    conv_weight: Tensor
    conv_bias: Tensor | None
    conv_input: int
    gate: int
    rest: Projection | None = None
    conv_gate: int = 0
    decay: int = 0
    beta: int = 0
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    D: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_eps: float = 0.0
    norm_groups: int = 1
    gate_first: bool = False

    def integers(self, vector: Any) -> dict[str, int]:
        """What it writes into the layout but for `rest`; vector(tensor) -> where that begins."""
        channels, _, taps = self.conv_weight.shape
        names = (*_PLACES, *_SIZES, "norm_groups", "gate_first")
        values = {name: int(getattr(self, name)) for name in names}
        values |= {name: vector(getattr(self, name)) for name in _VECTORS}
        values |= {"kind": KINDS.index(self.op), "channels": channels, "taps": taps}
        values["rest_features"] = 0 if self.rest is None else self.rest.weight.out_features
        return {f"recurrence_{name}": value for name, value in values.items()}


def projections_around(qkv: Projection, output: Projection) -> SelfAttention:
    """What `DecoderLayer.attention` is in a layer with a recurrence."""
    place = Heads(0, 0)
    return SelfAttention(qkv, 1, 1, 1, output.weight.in_features, place, place, place, 1.0, output)


def check_recurrence(recurrence: Recurrence, features: int, columns: int) -> None:
    """
    Args:
        features: of the hidden states.
        columns: that the layer's last projection takes.

    Raises:
        ValueError: its parts do not fit one another.
    """
    if recurrence.op not in KINDS[1:]:
        raise ValueError(f"op={recurrence.op!r} of recurrence: must be one of {', '.join(KINDS[1:])}")
    rest, channels = recurrence.rest, len(recurrence.conv_weight)
    if rest is not None and rest.weight.in_features != features:
        raise ValueError(f"rest of recurrence takes {rest.weight.in_features} features: must be {features}")
    given = recurrence.heads * recurrence.value_dim
    keys = 2 * recurrence.key_heads * recurrence.key_dim
    if recurrence.op == "short_convolution":
        given, keys = channels, 0
    if (given, given + keys) != (columns, channels):
        raise ValueError(
            f"recurrence of {channels} channels gives {given} features beside {keys} of keys: "
            f"the output projection takes {columns}"
        )


def recurrence_reference(layer: LayerArguments, x: Tensor, states: tuple[Tensor, Tensor]) -> Tensor:
    """The branch of x [B, q_len, C] without its norms; the states are written in place."""

    def integer(name: str) -> int:
        return layer.integer(f"recurrence_{name}")

    def vector(name: str, size: int) -> Tensor | None:
        return layer.vector(f"recurrence_{name}", size)

    op, channels, taps = KINDS[integer("kind")], integer("channels"), integer("taps")
    features, rest, heads = layer.integer("qkv_features"), integer("rest_features"), integer("heads")
    merged = layer.project("qkv", x, features)
    if rest:
        merged = torch.cat([merged, layer.project("recurrence_rest", x, rest)], dim=-1)

    def part(name: str, width: int) -> Tensor:
        return merged[..., integer(name) : integer(name) + width]

    weight, bias = vector("conv_weight", channels * taps), vector("conv_bias", channels)
    assert weight is not None
    columns = layer.integer("heads") * layer.integer("value_dim")
    convolution = (weight.view(channels, 1, taps), bias)
    eps = layer.floats["recurrence_norm_eps"]
    if op == "short_convolution":
        parts = [part("conv_gate", channels), part("gate", channels), part("conv_input", channels)]
        mixed = short_convolution_reference(torch.cat(parts, dim=-1), *convolution, states[0])
    elif op == "gated_delta_net":
        inputs = (
            part("conv_input", channels),
            part("gate", columns),
            part("decay", heads),
            part("beta", heads),
        )
        mixed = gated_delta_net_reference(
            *inputs, *convolution, vector("A_log", heads), vector("dt_bias", heads),
            vector("norm_weight", integer("value_dim")), eps, *states,
        )  # fmt: skip
    else:
        parts = [part("gate", columns), part("conv_input", channels), part("decay", heads)]
        mixed = state_space_reference(
            torch.cat(parts, dim=-1), *convolution, vector("A_log", heads), vector("D", heads), vector("dt_bias", heads),
            vector("norm_weight", columns), eps, integer("norm_groups"), bool(integer("gate_first")), None, *states,
        )  # fmt: skip
    return layer.project("output", mixed, x.shape[-1])
