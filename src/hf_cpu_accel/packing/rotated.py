"""Rotation, quantization and packing of integer weights in PyTorch: the reference of the op pack_rotated."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.packing import int4
from hf_cpu_accel.packing.panels import PANEL_FEATURES, panels_of
from hf_cpu_accel.packing.rotation import rotate_back

CHUNK_VALUES = 1 << 18  # 1 MB of float32 at a time


def shape_of(out_features: int, in_features: int, group: int) -> tuple[int, ...]:
    """Return the shape of the packed data: bytes of int4 in groups of `group`, or int8 if `group` is 0."""
    panels = -(-out_features // PANEL_FEATURES)
    if group:
        return panels, -(-in_features // group), PANEL_FEATURES + 16 * group
    return panels, -(-in_features // 4), PANEL_FEATURES, 4


def pack_rotated_reference(weight: Tensor, group: int, data: Tensor, scale: Tensor) -> None:
    """Fill `data` and `scale` of an integer weight, a few panels at a time, since the rotation makes several float32 copies.

    Args:
        weight: [N, K] float32 or bfloat16.
        group: the number of input features per multiplier of int4, or 0 for int8.
        data, scale: contiguous, with the number of elements of `shape_of` and [2, N], in any shape.

    Raises:
        ValueError: another group, or other sizes.
    """
    out_features, in_features = weight.shape
    int4.check_group(group or int4.GROUPS[0])
    shapes = shape_of(out_features, in_features, group), (2, out_features)
    if (data.numel(), scale.numel()) != tuple(map(math.prod, shapes)):
        raise ValueError(f"pack_rotated: data and scale must have the shapes {shapes}")
    data, scale = data.view(shapes[0]), scale.view(shapes[1])
    step = max(1, CHUNK_VALUES // max(1, in_features) // PANEL_FEATURES)
    for panel in range(0, len(data), step):
        rows = slice(panel * PANEL_FEATURES, min((panel + step) * PANEL_FEATURES, out_features))
        rotated = rotate_back(weight[rows].float())
        if group:
            data[panel : panel + step], scale[:, rows] = _int4_panels(rotated, group)
        else:
            values, scale[:, rows] = quantize_per_feature(rotated)
            panels_of(values, 4, data[panel : panel + step])


def _int4_panels(rotated: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of whole panels, and scales and sums [2, N], of the rotated weight [N, K]."""
    rows, columns = rotated.shape
    if rows % PANEL_FEATURES or columns % group:
        rotated = F.pad(rotated, (0, -columns % group, 0, -rows % PANEL_FEATURES))
    index, multiplier, scale = torch.ops.hf_cpu_accel.quantize_int4(rotated, group)
    return int4.pack(index, multiplier, group), scale[:, :rows]


def quantize_per_feature(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize float32 [N, K] symmetrically to int8 per output feature: values int8 [N, K], and float32 [2, N] (scales; sums)."""
    step = weight.abs().amax(dim=1) / 127 if weight.shape[1] else weight.new_zeros(weight.shape[0])
    safe = torch.where(step > 0, step, torch.ones_like(step))
    values = torch.round(weight / safe[:, None]).clamp_(-127, 127).to(torch.int8)
    return values, torch.stack([step, values.sum(dim=1, dtype=torch.float32)])
