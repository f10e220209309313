"""quantize_int4: search for the best 4-bit weights. pack_rotated: rotate, quantize and pack integer weights in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.ops.registry import declare
from hf_cpu_accel.packing import int4
from hf_cpu_accel.packing.rotated import pack_rotated_reference


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the levels, multipliers and scales of `int4.quantize`. Among equally good ones the kernel may choose another.

    Args:
        weight: [N, K] float32, contiguous, finite; K divisible by group.
        group: one of `int4.GROUPS`.

    Returns:
        index uint8 [N, K], multiplier int8 [N, K / group], float32 [2, N] (scales; sums of multiplier * level).

    Raises:
        ValueError: `group` is not in `int4.GROUPS`, or does not divide K.
    """
    int4.check_group(group)
    if weight.dim() != 2 or weight.shape[1] % group:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)}: must be a matrix whose columns are whole groups of {group}"
        )
    index, multiplier, scale = torch.ops.hf_cpu_accel.quantize_int4(weight, group)
    return index, multiplier, scale


def _quantize_fake(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = weight.shape
    return (
        weight.new_empty((rows, columns), dtype=torch.uint8),
        weight.new_empty((rows, columns // group), dtype=torch.int8),
        weight.new_empty((2, rows)),
    )


declare(
    "quantize_int4(Tensor weight, int group) -> (Tensor, Tensor, Tensor)",
    fake=_quantize_fake,
    reference=int4.quantize,
)
declare(
    "pack_rotated(Tensor weight, int group, Tensor(a!) data, Tensor(b!) scale) -> ()",
    fake=lambda *_: None,
    reference=pack_rotated_reference,
)
