"""lstm_layer: all steps of an LSTM layer (Hochreiter & Schmidhuber 1997), with an optional projection (Sak et al. 2014,
arXiv:1402.1128)."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.ops.linear import linear_reference
from hf_cpu_accel.ops.registry import declare
from hf_cpu_accel.packing.linear import PackedWeight


def lstm_layer(
    gates: Tensor,
    weight: PackedWeight,
    projection: PackedWeight | None,
    hidden: Tensor,
    cell: Tensor,
    *,
    reverse: bool = False,
) -> Tensor:
    """Compute the hidden state of each step, and write the last cell state into `cell`.

    Args:
        gates: float32 [L, B, 4 * C] contiguous, L at least 1: the products of the input plus both biases, in torch's order of gates
            (input, forget, cell, output).
        weight: from `pack_linear`, [4 * C, P]: the weight of the hidden state.
        projection: from `pack_linear`, [P, C]: the projection of the hidden state; None for P = C.
        hidden: float32 [B, P] contiguous, the hidden state before the first step.
        cell: float32 [B, C] contiguous, the cell state before the first step; written in place.
        reverse: run from the last step to the first.

    Returns:
        float32 [L, B, P] contiguous.

    Raises:
        RuntimeError: the shapes or dtypes do not fit.
    """
    output: Tensor = torch.ops.hf_cpu_accel.lstm_layer(
        gates,
        weight.data,
        weight.scale,
        None if projection is None else projection.data,
        None if projection is None else projection.scale,
        hidden,
        cell,
        reverse,
    )
    return output


def lstm_layer_reference(
    gates: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    projection: Tensor | None,
    projection_scale: Tensor | None,
    hidden: Tensor,
    cell: Tensor,
    reverse: bool,
) -> Tensor:
    """Compute the op in PyTorch."""
    outputs = hidden.shape[1]
    states = torch.empty(*gates.shape[:2], outputs)
    last = hidden
    steps = range(len(gates))
    for step in reversed(steps) if reverse else steps:
        sums = linear_reference(last, weight, scale, None, gates[step], gates.shape[2], "none")
        i, f, g, o = sums.chunk(4, dim=1)
        cell.copy_(torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g))
        last = torch.sigmoid(o) * torch.tanh(cell)
        if projection is not None:
            last = linear_reference(last, projection, projection_scale, None, None, outputs, "none")
        states[step] = last
    return states


def lstm_layer_fake(gates: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
    return gates.new_empty(*gates.shape[:2], rest[3].shape[1])


declare(
    "lstm_layer(Tensor gates, Tensor weight, Tensor? scale, Tensor? projection, Tensor? projection_scale, Tensor hidden, "
    "Tensor(a!) cell, bool reverse) -> Tensor",
    fake=lstm_layer_fake,
    reference=lstm_layer_reference,
)
