"""Packing of weights of convolutions.

Most weights are packed as a linear layer on the pixels of a window, [window row, window column, channel] (see linear.py). Three
kinds have other dimensions:

    windows      data[panel, pixel of the window, channel word, feature in panel, value in word]
    tiles        data[panel, row of the tile, column of the tile, channel word, feature in panel, value in word]
    groups       data[pixel of the window, channel of the group, channel], float32

- windows: int8 weights for images that are quantized as a whole and not rotated, since windows share pixels.
- tiles: weights for images that are cut into tiles (winograd.py), 16 weights of linear layers. int8 ones have a scale and a sum for
  each, float32 [2, 16, out_features].
- groups: weights of grouped convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cpu_accel.packing import winograd
from hf_cpu_accel.packing.affine import BITS
from hf_cpu_accel.packing.linear import (
    PANEL_FEATURES,
    PackedWeight,
    allocate,
    pack_linear,
    panels_of,
    shapes_of,
    unpack_linear,
)
from hf_cpu_accel.packing.rotated import CHUNK_VALUES, quantize_per_feature

# Images are quantized as a whole, or cut into tiles, in multiples of these channels, so that pixels fill whole lines of packed
# input.
IMAGE_CHANNELS, TILE_CHANNELS = 64, 32

# The minimum input and output channels for tiles: with fewer, the transforms take longer than the products save.
_LEAST_CHANNELS = {"float32": 1, "bfloat16": 1, "int8": 192}

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


def pack_conv2d(weight: Tensor, dtype: str, *, tiled: bool = False) -> PackedWeight:
    """Pack the weight of a convolution.

    Args:
        weight: [out_channels, in_channels, kernel height, kernel width], floating point, finite.
        dtype: one of `packing.DTYPES`.
        tiled: pack for images that are cut into tiles.

    Raises:
        ValueError: another dtype, a weight of another shape, or `tiled` for a weight that `takes_tiles` excludes.
    """
    if weight.dim() != 4:
        raise ValueError(f"weight of shape {tuple(weight.shape)}: must be [out, in, height, width]")
    if dtype in BITS:
        raise ValueError(
            f"dtype={dtype!r}: not supported for convolutions; use float32, bfloat16, int8 or int4"
        )
    if tiled and not takes_tiles(weight.shape, dtype):
        raise ValueError(
            f"tiled=True: a weight of shape {tuple(weight.shape)} in {dtype} is not for tiles; expected [out, in, 3, 3] in "
            f"float32, bfloat16, or int8 from {_LEAST_CHANNELS['int8']} channels, with a multiple of {TILE_CHANNELS} input channels"
        )
    if tiled:
        return _pack_tiles(weight.detach(), dtype)
    windows = weight.detach().permute(0, 2, 3, 1)
    if _quantizes_images(weight.shape, dtype):
        return _pack_windows(windows.flatten(1, 2))
    return pack_linear(windows.flatten(1), dtype)


def pack_grouped(weight: Tensor) -> PackedWeight:
    """Pack the weight of a grouped convolution with as many outputs as inputs, in float32.

    Args:
        weight: [C, channels of a group, kernel height, kernel width], floating point.

    Raises:
        ValueError: a weight of another shape.
    """
    if weight.dim() != 4 or 0 in weight.shape or weight.shape[0] % weight.shape[1]:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)}: must be [channels, channels of a group, height, width]"
        )
    data = weight.detach().float().flatten(2).permute(2, 1, 0).contiguous()
    return PackedWeight(data, None, weight[0].numel(), data.shape[2], "float32")


def is_grouped(data: Tensor) -> bool:
    """Return whether this is the data of a weight of a grouped convolution."""
    return data.dim() == 3 and data.dtype is torch.float32


def takes_tiles(
    shape: Sequence[int], dtype: str, stride: Sequence[int] = (1, 1), dilation: Sequence[int] = (1, 1)
) -> bool:
    """Return whether a convolution with a weight of that shape can be computed by tiles, in about half of the time."""
    dense = all(step == 1 for step in (*stride, *dilation)) and tuple(shape[2:]) == (3, 3)
    least = _LEAST_CHANNELS.get(dtype)
    return dense and least is not None and min(shape[:2]) >= least and shape[1] % TILE_CHANNELS == 0


def packed_shapes(shape: Sequence[int], dtype: str, *, tiled: bool = False) -> Shapes:
    """Return shape and dtype of the `data`, and of the `scale` if there is one, of `pack_conv2d` for a weight of that shape."""
    out_channels, channels, *sides = shape
    pixels = math.prod(sides)
    if tiled:
        ((panels, *word), kind), *scales = shapes_of(out_channels, channels, dtype)
        data = ((panels, winograd.SIDE, winograd.SIDE, *word), kind)
        return [data, *(((2, winograd.POSITIONS, out_channels), number) for _, number in scales)]
    if _quantizes_images(shape, dtype):
        ((panels, _, *word), kind), *scales = shapes_of(out_channels, pixels * channels, dtype)
        return [((panels, pixels, channels // 4, *word), kind), *scales]
    return shapes_of(out_channels, pixels * channels, dtype)


def unpack_conv2d(packed: PackedWeight, kernel_size: Sequence[int]) -> Tensor:
    """Return the weight [out_channels, in_channels, *kernel_size] in float32.

    It is bit-identical for "float32" (up to rounding for tiles), and dequantized for other dtypes.
    """
    if is_of_tiles(packed.data):
        return winograd.recover_weight(transformed_weight(packed))
    if is_of_windows(packed.data):
        assert packed.scale is not None
        panels, pixels, words, features, per_word = packed.data.shape
        values = packed.data.permute(0, 3, 1, 2, 4).reshape(panels * features, pixels * words * per_word)
        rows = values[: packed.out_features] * packed.scale[0, :, None]
    else:
        rows = unpack_linear(packed)
    height, width = kernel_size
    return rows.view(packed.out_features, height, width, -1).permute(0, 3, 1, 2)


def is_of_windows(data: Tensor) -> bool:
    """Return whether this is the data of a weight for images that are quantized as a whole."""
    return data.dim() == 5


def is_of_tiles(data: Tensor) -> bool:
    """Return whether this is the data of a weight for tiles."""
    return data.dim() == 6


def transformed_weight(packed: PackedWeight) -> Tensor:
    """Return the transformed weight of `winograd.transform_weight` after rounding, [16, N, C] float32."""
    weights = []
    for position, data in enumerate(packed.data.flatten(1, 2).unbind(1)):
        scale = None if packed.scale is None else packed.scale[:, position]
        channels = data.shape[1] * data.shape[3]
        weights.append(unpack_linear(PackedWeight(data, scale, channels, packed.out_features, packed.dtype)))
    return torch.stack(weights)


def _quantizes_images(shape: Sequence[int], dtype: str) -> bool:
    return dtype == "int8" and shape[1] % IMAGE_CHANNELS == 0 and math.prod(shape) > 0


def _pack_windows(weight: Tensor) -> PackedWeight:
    """Pack a weight [N, pixels of the window, C] for images that are quantized as a whole."""
    out_channels, pixels, channels = weight.shape
    values, scale = quantize_per_feature(weight.flatten(1).float())
    (shape, kind), _ = packed_shapes((out_channels, channels, pixels), "int8")
    data = allocate(shape, kind)
    data.copy_(panels_of(values, 4).view(shape))
    return PackedWeight(data, scale, pixels * channels, out_channels, "int8")


def _pack_tiles(weight: Tensor, dtype: str) -> PackedWeight:
    """Pack a weight [N, C, 3, 3] for tiles, a few panels at a time, so that packing needs little more memory than the result."""
    out_channels, channels, *_ = weight.shape
    (shape, kind), *sums = packed_shapes(weight.shape, dtype, tiled=True)
    data, scale = allocate(shape, kind), allocate(*sums[0]) if sums else None
    positions = data.flatten(1, 2)
    step = max(1, CHUNK_VALUES // (winograd.POSITIONS * channels * PANEL_FEATURES))
    for panel in range(0, shape[0], step):
        rows = slice(panel * PANEL_FEATURES, min((panel + step) * PANEL_FEATURES, out_channels))
        for position, values in enumerate(winograd.transform_weight(weight[rows])):
            packed = pack_linear(values, dtype)
            positions[panel : panel + step, position] = packed.data
            if scale is not None and packed.scale is not None:
                scale[:, position, rows] = packed.scale
    return PackedWeight(data, scale, 9 * channels, out_channels, dtype)
