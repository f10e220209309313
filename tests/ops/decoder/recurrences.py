"""Layers with a recurrence for the tests of decoder_layers, of any sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.decoder.layers import (
    DecoderLayer,
    Projection,
    Recurrence,
    bind,
    projections_around,
)
from hf_cpu_accel.packing.linear import pack_linear
from tests.ops.decoder.call import Call, call_of
from tests.ops.decoder.cases import Case, layers_of

OPS = ["short_convolution", "gated_delta_net", "state_space", "selective_scan"]
_RANK = 12  # of what a selective scan's dt are made of


@dataclass(frozen=True)
class Sizes:
    """Of a recurrence.

    Attributes:
        channels: of a short convolution and of a selective scan; the others' follow from their heads.
        key_heads, key_dim: of a state space, its groups and the features of its state, the latter of a selective scan, too.
        norm_groups: of a state space; divides heads * value_dim.
        normed: whether a state space has a norm, and a selective scan norms.
    """

    taps: int = 4
    channels: int = 96
    heads: int = 4
    key_heads: int = 2
    key_dim: int = 24
    value_dim: int = 40
    norm_groups: int = 2
    gate_first: bool = True
    normed: bool = True


def recurrence(op: str, case: Case, sizes: Sizes, states: torch.dtype) -> tuple[DecoderLayer, list[Tensor]]:
    """A layer with one, its other parts those of `case`, and its states."""

    def projection(rows: int, columns: int, scale: float = 1.0) -> Projection:
        bias = 0.1 * torch.randn(rows) if case.biases else None
        return Projection(pack_linear(scale * torch.randn(rows, columns) / columns**0.5, case.weights), bias)

    heads, columns = sizes.heads, sizes.heads * sizes.value_dim
    channels = 2 * sizes.key_heads * sizes.key_dim + columns
    settings: dict[str, Any]
    size: tuple[int, ...]
    if op == "short_convolution":
        channels = columns = sizes.channels
        wide, rest, size = 3 * channels, 0, (0,)
        settings = {"gate": channels, "conv_input": 2 * channels, "conv_gate": 0}
    elif op == "gated_delta_net":
        wide, rest, size = channels + columns, 2 * heads + 3, (heads, sizes.key_dim, sizes.value_dim)
        settings = {
            "conv_input": 0,
            "gate": channels,
            "beta": wide + 2,
            "decay": wide + 3 + heads,
            "norm_weight": 1 + 0.1 * torch.randn(sizes.value_dim),
        }
    elif op == "selective_scan":
        channels = columns = sizes.channels
        wide, rest, size = 2 * channels, 0, (channels, sizes.key_dim)
        settings = {
            "conv_input": channels,
            "gate": 0,
            "key_dim": sizes.key_dim,
            "A_log": torch.rand(size),
            "D": torch.randn(channels),
            "selected": projection(_RANK + 2 * sizes.key_dim, channels),
            "steps": projection(channels, _RANK),
            "norm_eps": 1e-6,
        }
        widths = {"dt_norm": _RANK, "B_norm": sizes.key_dim, "C_norm": sizes.key_dim}
        settings |= {name: 1 + 0.1 * torch.randn(n) for name, n in widths.items() if sizes.normed}
    else:
        wide, rest, size = columns + channels + heads, 0, (heads, sizes.value_dim, sizes.key_dim)
        settings = {
            "gate": 0,
            "conv_input": columns,
            "decay": columns + channels,
            "D": torch.randn(heads),
            "norm_weight": 1 + 0.1 * torch.randn(columns) if sizes.normed else None,
            "norm_groups": sizes.norm_groups,
            "gate_first": sizes.gate_first,
        }
    if op in ("gated_delta_net", "state_space"):
        names = ("heads", "key_heads", "key_dim", "value_dim")
        settings |= {name: getattr(sizes, name) for name in names}
        settings |= {"A_log": torch.rand(heads), "dt_bias": torch.randn(heads), "norm_eps": 1e-6}
    made = Recurrence(
        op,  # type: ignore[arg-type]
        torch.randn(channels, 1, sizes.taps) / 2,
        0.1 * torch.randn(channels) if case.biases else None,
        rest=projection(rest, case.features) if rest else None,
        **settings,
    )
    # Without norms what a scan gives would grow by its square from layer to layer.
    scale = 0.1 if op == "selective_scan" and case.norms == "none" else 1.0
    around = projections_around(projection(wide, case.features, scale), projection(case.features, columns))
    layer = replace(layers_of(replace(case, layers=1))[0], attention=around, recurrence=made)
    return layer, [
        torch.randn(case.batch, channels, sizes.taps).to(states),
        0.3 * torch.randn(case.batch, *size),
    ]


def recurrent_call(op: str, case: Case, sizes: Sizes, states: torch.dtype = torch.float32) -> Call:
    """Attention between two layers with a recurrence."""
    call = call_of(case)
    first, last = (recurrence(op, case, sizes, states) for _ in range(2))
    call.layers = bind([first[0], *layers_of(case), last[0]])
    call.keys = [first[1][0], *call.keys, last[1][0]]
    call.values = [first[1][1], *call.values, last[1][1]]
    call.past = [0, *call.past, 0]
    inputs = torch.randn(call.layers.per_layer_inputs, *call.hidden_states.shape[:2], case.per_layer)
    call.per_layer_inputs = list(inputs.to(case.dtype))  # of the two layers around as well
    return call
