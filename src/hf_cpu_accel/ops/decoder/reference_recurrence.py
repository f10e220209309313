"""The reference of decoder_layers for layers with a recurrence instead of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.abi import RECURRENCE_KINDS
from hf_cpu_accel.ops.decoder.reference_arguments import LayerArguments
from hf_cpu_accel.ops.recurrent.gated_delta_net import gated_delta_net_reference
from hf_cpu_accel.ops.recurrent.selective_scan import causal_convolution_reference, selective_scan_reference
from hf_cpu_accel.ops.recurrent.short_convolution import short_convolution_reference
from hf_cpu_accel.ops.recurrent.state_space import state_space_reference


def recurrence_reference(layer: LayerArguments, x: Tensor, states: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the branch of x [B, q_len, C] without its norms; the states are updated in place."""
    layout = layer.layout.recurrence

    op, channels, taps = RECURRENCE_KINDS[layout.kind], layout.channels, layout.taps
    features, rest, heads = layer.layout.qkv_features, layout.rest_features, layout.heads
    merged = layer.project(layer.layout.qkv, x, features)
    if rest:
        merged = torch.cat([merged, layer.project(layout.rest, x, rest)], dim=-1)

    def part(first: int, width: int) -> Tensor:
        return merged[..., first : first + width]

    weight, bias = layer.vector(layout.conv_weight, channels * taps), layer.vector(layout.conv_bias, channels)
    assert weight is not None
    columns = layer.layout.heads * layer.layout.value_dim
    convolution = (weight.view(channels, 1, taps), bias)
    eps = layer.scalars.recurrence_norm_eps
    if op == "short_convolution":
        parts = [
            part(layout.conv_gate, channels),
            part(layout.gate, channels),
            part(layout.conv_input, channels),
        ]
        mixed = short_convolution_reference(torch.cat(parts, dim=-1), *convolution, states[0])
    elif op == "gated_delta_net":
        inputs = (
            part(layout.conv_input, channels),
            part(layout.gate, columns),
            part(layout.decay, heads),
            part(layout.beta, heads),
        )
        mixed = gated_delta_net_reference(
            *inputs, *convolution, layer.vector(layout.A_log, heads), layer.vector(layout.dt_bias, heads),
            layer.vector(layout.norm_weight, layout.value_dim), eps, *states,
        )  # fmt: skip
    elif op == "selective_scan":
        mixed = _scanned(
            layer, part(layout.conv_input, channels), part(layout.gate, channels), convolution, states
        )
    else:
        parts = [part(layout.gate, columns), part(layout.conv_input, channels), part(layout.decay, heads)]
        mixed = state_space_reference(
            torch.cat(parts, dim=-1), *convolution,
            layer.vector(layout.A_log, heads), layer.vector(layout.D, heads), layer.vector(layout.dt_bias, heads),
            layer.vector(layout.norm_weight, columns), eps, layout.norm_groups, bool(layout.gate_first),
            0.0, float("inf"), None, *states,
        )  # fmt: skip
    return layer.project(layer.layout.output, mixed, x.shape[-1])


def _scanned(
    layer: LayerArguments,
    input: Tensor,
    gate: Tensor,
    convolution: tuple[Tensor, Tensor | None],
    states: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the output of a selective scan."""
    layout, eps = layer.layout.recurrence, layer.scalars.recurrence_norm_eps
    channels, features, width = input.shape[-1], layout.key_dim, layout.selected_features
    x = causal_convolution_reference(input, *convolution, None, states[0])
    parts = []
    selected = layer.project(layout.selected, x, width)
    for norm, part in zip(
        (layout.dt_norm, layout.B_norm, layout.C_norm),
        selected.split([width - 2 * features, features, features], dim=-1),
        strict=True,
    ):
        weight = layer.vector(norm, part.shape[-1])
        parts.append(
            part if weight is None else torch.nn.functional.rms_norm(part, part.shape[-1:], weight, eps)
        )
    dt = layer.project(layout.steps, parts[0], channels)
    A_log = layer.vector(layout.A_log, channels * features)
    assert A_log is not None
    vectors = (A_log.view(channels, features), layer.vector(layout.D, channels))
    return selective_scan_reference(x, dt, *parts[1:], gate, *vectors, states[1])
