"""The linears of optimum-quanto: integers of 2, 4 or 8 bits, or float8, in its own tensor classes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.checkpoints import tinygemm
from hf_cpu_accel.checkpoints.stored_weight import (
    StoredWeight,
    holding_group,
    integers_of,
    is_stand_in,
    spread,
)
from hf_cpu_accel.packing.affine import AffineGroups


def read(module: nn.Module) -> StoredWeight | None:
    """Read a frozen `QLinear`; None for other modules."""
    host = sys.modules.get("optimum.quanto.nn.qlinear")
    if host is None or not isinstance(module, host.QLinear) or not is_stand_in(module.weight):
        return None
    weight: Any = module.weight
    form, in_features = f"quanto {weight.qtype.name}", weight.shape[1]
    is_float, in_groups = weight.qtype.is_floating_point, hasattr(weight, "_group_size")
    stored_group = (weight._group_size if in_groups else None) or in_features
    group = holding_group(stored_group, in_features)
    refusal = None
    if weight.axis not in (0, None):
        refusal = f"{form}: scales per input feature are not supported"
    elif group is None and not is_float:
        refusal = f"{form}: groups of {stored_group} input features are not supported"
    packed_group = group or 32
    rows = (
        _rows_of_groups(weight, stored_group, packed_group)
        if in_groups
        else _rows_of_bytes(weight, packed_group)
    )
    return StoredWeight(
        form,
        weight.shape[0],
        in_features,
        4 if in_groups else 8,
        packed_group,
        None if is_float else rows,
        integers_of(weight),
        refusal,
        values=(lambda first, last: _floats(weight, first, last)) if is_float else None,
        agreement="float32" if weight.dtype is torch.float32 else "bfloat16",
        reference=lambda input: module(input.to(weight.dtype)),
    )


def _rows_of_bytes(weight: Any, group: int) -> Callable[[int, int], AffineGroups]:
    def rows(first: int, last: int) -> AffineGroups:
        q = weight._data.detach()[first:last].view(torch.uint8) ^ 128
        scale = _scale_of(weight, first, last)
        return AffineGroups(q, scale, -128 * scale, 8, group)

    return rows


def _floats(weight: Any, first: int, last: int) -> Tensor:
    return weight._data.detach()[first:last].float() * _scale_of(weight, first, last)


def _scale_of(weight: Any, first: int, last: int) -> Tensor:
    """Return the scales of rows [first, last), float32 [last - first, 1]."""
    scale = weight._scale.detach().float().reshape(-1, 1)
    return scale.expand(last - first, 1) if len(scale) == 1 else scale[first:last]


def _rows_of_groups(weight: Any, given: int, group: int) -> Callable[[int, int], AffineGroups]:
    columns = weight.shape[1]
    if hasattr(weight, "_scale_shift"):
        integers = cache(lambda: tinygemm.integers(weight._data._data.detach(), columns))
        return lambda first, last: tinygemm.affine_rows(
            integers(), weight._scale_shift.detach(), given, first, last
        )

    def rows(first: int, last: int) -> AffineGroups:
        q = _unpacked(weight._data, first * columns, last * columns).view(-1, columns)
        scale, shift = (
            spread(part.detach(), given, first, last, columns, group)
            for part in (weight._scale, weight._shift)
        )
        # A shift is either a value of the weight, or an integer like q.
        offset = -shift if weight._shift.is_floating_point() else -scale * shift
        return AffineGroups(q, scale, offset, 4, group)

    return rows


def _unpacked(packed: Any, start: int, stop: int) -> Tensor:
    """Return the elements [start, stop) of a flattened `PackedTensor` as uint8; its first rows are in the lowest bits."""
    rows, width = packed.shape
    words: Tensor = packed._data.detach()
    first, last = start // width, min(-(-stop // width), rows)
    row = torch.arange(first, last)
    shift = packed._bits * (row // len(words))
    fields = (words[row % len(words)] >> shift[:, None].to(torch.uint8)) & (2**packed._bits - 1)
    return fields.reshape(-1)[start - first * width : stop - first * width]
