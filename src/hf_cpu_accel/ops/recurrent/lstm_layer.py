"""lstm_layer: all steps of a layer of a long short-term memory (Hochreiter & Schmidhuber 1997), with the projection of
Sak et al. 2014 (arXiv:1402.1128) if it has one."""

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
    """The hidden state of each step, and the last cell state in `cell`.

    Args:
        gates: float32 [L, B, 4 * C] contiguous, L at least 1: the input's products and both biases, gates in torch's order (input,
            forget, cell, output).
        weight: of `pack_linear`, [4 * C, P]: of the hidden state.
        projection: [P, C], which makes the hidden state of what the gates give, or None: then P = C.
        hidden: float32 [B, P] contiguous, before the first step.
        cell: float32 [B, C] contiguous, before the first step; written.
        reverse: from the last step to the first.

    Returns:
        float32 [L, B, P] contiguous.

    Raises:
        RuntimeError: if the shapes or dtypes do not fit.
    """
    made: Tensor = torch.ops.hf_cpu_accel.lstm_layer(
        gates,
        weight.data,
        weight.scale,
        None if projection is None else projection.data,
        None if projection is None else projection.scale,
        hidden,
        cell,
        reverse,
    )
    return made


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
    """The op in plain torch."""
    outputs = hidden.shape[1]
    made = torch.empty(*gates.shape[:2], outputs)
    last = hidden
    steps = range(len(gates))
    for step in reversed(steps) if reverse else steps:
        sums = linear_reference(last, weight, scale, None, gates[step], gates.shape[2], "none")
        i, f, g, o = sums.chunk(4, dim=1)
        cell.copy_(torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g))
        last = torch.sigmoid(o) * torch.tanh(cell)
        if projection is not None:
            last = linear_reference(last, projection, projection_scale, None, None, outputs, "none")
        made[step] = last
    return made


def lstm_layer_fake(gates: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
    return gates.new_empty(*gates.shape[:2], rest[3].shape[1])


declare(
    "lstm_layer(Tensor gates, Tensor weight, Tensor? scale, Tensor? projection, Tensor? projection_scale, Tensor hidden, "
    "Tensor(a!) cell, bool reverse) -> Tensor",
    fake=lstm_layer_fake,
    reference=lstm_layer_reference,
)
