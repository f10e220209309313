"""Packed weights with their output features in another order: nothing is unpacked or rounded."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_cpu_accel.packing.affine import BITS, form_of
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.packing.panels import PANEL_FEATURES, allocate

_WORD = 4  # bytes of one output feature that stand side by side


def in_order(packed: PackedWeight, order: Tensor) -> PackedWeight:
    """A copy whose output feature i is `order[i]` of `packed`.

    Args:
        packed: of a linear.
        order: int64 [out_features], each once.
    """
    data = packed.data.contiguous()
    if not data.numel():
        return packed
    rows = torch.cat([order, torch.arange(len(order), data.shape[0] * PANEL_FEATURES)])  # padding stays
    made = allocate(data.shape, data.dtype)
    source, target = (values.view(torch.uint8).flatten(2) for values in (data, made))
    start = 0
    for width in _widths(packed):
        stop = start + PANEL_FEATURES * width
        target[:, :, start:stop] = _reordered(source[:, :, start:stop], width, rows)
        start = stop
    target[:, :, start:] = _reordered(source[:, :, start:], _WORD, rows)
    scale = None if packed.scale is None else packed.scale[..., order].contiguous()
    return replace(packed, data=made, scale=scale)


def _widths(packed: PackedWeight) -> tuple[int, ...]:
    """How many bytes an output feature has in each part of a group ahead of its weights."""
    if packed.dtype == "int4":
        return (1,)  # the multipliers
    if packed.dtype in BITS:
        width = 2 if form_of(packed.data)[2] else 4
        return width, width  # scales and offsets
    return ()


def _reordered(part: Tensor, width: int, rows: Tensor) -> Tensor:
    """Bytes [panels, groups, n * 32 * width] with their output features in the order of `rows`."""
    panels, groups, _ = part.shape
    whole = part.reshape(panels, groups, -1, PANEL_FEATURES, width).permute(0, 3, 1, 2, 4)
    chosen = whole.reshape(panels * PANEL_FEATURES, -1)[rows]
    features = chosen.view(panels, PANEL_FEATURES, groups, -1, width)
    return features.permute(0, 2, 3, 1, 4).reshape(part.shape)
