"""The reference of decoder_layers for layers with a recurrence instead of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.ops.decoder.recurrence import KINDS
from hf_cpu_accel.ops.decoder.reference_arguments import LayerArguments
from hf_cpu_accel.ops.recurrent.gated_delta_net import gated_delta_net_reference
from hf_cpu_accel.ops.recurrent.selective_scan import causal_convolution_reference, selective_scan_reference
from hf_cpu_accel.ops.recurrent.short_convolution import short_convolution_reference
from hf_cpu_accel.ops.recurrent.state_space import state_space_reference


def recurrence_reference(layer: LayerArguments, x: Tensor, states: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the branch of x [B, q_len, C] without its norms; the states are updated in place."""

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
    elif op == "selective_scan":
        mixed = _scanned(layer, part("conv_input", channels), part("gate", channels), convolution, states)
    else:
        parts = [part("gate", columns), part("conv_input", channels), part("decay", heads)]
        mixed = state_space_reference(
            torch.cat(parts, dim=-1), *convolution, vector("A_log", heads), vector("D", heads), vector("dt_bias", heads),
            vector("norm_weight", columns), eps, integer("norm_groups"), bool(integer("gate_first")),
            0.0, float("inf"), None, *states,
        )  # fmt: skip
    return layer.project("output", mixed, x.shape[-1])


def _scanned(
    layer: LayerArguments,
    input: Tensor,
    gate: Tensor,
    convolution: tuple[Tensor, Tensor | None],
    states: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the output of a selective scan."""
    channels, features = input.shape[-1], layer.integer("recurrence_key_dim")
    width = layer.integer("recurrence_selected_features")
    x = causal_convolution_reference(input, *convolution, None, states[0])
    parts = []
    selected = layer.project("recurrence_selected", x, width)
    for name, part in zip(
        ("dt", "B", "C"), selected.split([width - 2 * features, features, features], dim=-1), strict=True
    ):
        weight = layer.vector(f"recurrence_{name}_norm", part.shape[-1])
        eps = layer.floats["recurrence_norm_eps"]
        parts.append(
            part if weight is None else torch.nn.functional.rms_norm(part, part.shape[-1:], weight, eps)
        )
    dt = layer.project("recurrence_steps", parts[0], channels)
    A_log = layer.vector("recurrence_A_log", channels * features)
    assert A_log is not None
    vectors = (A_log.view(channels, features), layer.vector("recurrence_D", channels))
    return selective_scan_reference(x, dt, *parts[1:], gate, *vectors, states[1])
