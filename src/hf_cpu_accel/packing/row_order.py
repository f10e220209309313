"""Reordering of the output features of packed weights, without unpacking or rounding."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_cpu_accel.packing.affine import BITS, form_of
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.packing.panels import PANEL_FEATURES, allocate

_WORD = 4  # adjacent bytes of one output feature


def in_order(packed: PackedWeight, order: Tensor) -> PackedWeight:
    """Return a copy whose output feature i is `order[i]` of `packed`.

    Args:
        packed: the weight of a linear layer.
        order: int64 [out_features], a permutation.
    """
    data = packed.data.contiguous()
    if not data.numel():
        return packed
    rows = torch.cat([order, torch.arange(len(order), data.shape[0] * PANEL_FEATURES)])  # padding stays
    result = allocate(data.shape, data.dtype)
    source, target = (values.view(torch.uint8).flatten(2) for values in (data, result))
    start = 0
    for width in _widths(packed):
        stop = start + PANEL_FEATURES * width
        target[:, :, start:stop] = _reordered(source[:, :, start:stop], width, rows)
        start = stop
    target[:, :, start:] = _reordered(source[:, :, start:], _WORD, rows)
    scale = None if packed.scale is None else packed.scale[..., order].contiguous()
    return replace(packed, data=result, scale=scale)


def _widths(packed: PackedWeight) -> tuple[int, ...]:
    """Return the bytes per output feature of each part of a group before its weights."""
    if packed.dtype == "int4":
        return (1,)  # the multipliers
    if packed.dtype in BITS:
        width = 2 if form_of(packed.data)[2] else 4
        return width, width  # scales and offsets
    return ()


def _reordered(part: Tensor, width: int, rows: Tensor) -> Tensor:
    """Reorder the output features of bytes [panels, groups, n * 32 * width] by `rows`."""
    panels, groups, _ = part.shape
    by_feature = part.reshape(panels, groups, -1, PANEL_FEATURES, width).permute(0, 3, 1, 2, 4)
    ordered = by_feature.reshape(panels * PANEL_FEATURES, -1)[rows]
    features = ordered.view(panels, PANEL_FEATURES, groups, -1, width)
    return features.permute(0, 2, 3, 1, 4).reshape(part.shape)
