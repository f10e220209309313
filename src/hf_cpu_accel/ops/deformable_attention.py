"""deformable_attention: attention to a few points of images of several sizes (Zhu et al. 2020, arXiv:2010.04159).

    output[b, q, h] = sum over points p of weights[b, q, h, p] * value of the point's image at points[b, q, h, p]

Values between pixels are interpolated bilinearly, with pixel centers half a pixel from the border (align_corners=False). Points
outside of an image, NaN or infinite give 0. Arithmetic is float32 for every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cpu_accel.ops.derivatives import refuse_derivatives
from hf_cpu_accel.ops.registry import declare


def deformable_attention(
    value: Tensor,
    shapes: Sequence[tuple[int, int]],
    counts: Sequence[int],
    points: Tensor,
    weights: Tensor,
) -> Tensor:
    """Compute the weighted sum of interpolated values at a few points of each image.

    Args:
        value: [B, pixels, H, D] float32 or bfloat16, last dimension dense: the pixels of all images, one after another, row by row.
        shapes: (height, width) of each image in pixels.
        counts: the number of points in each image per query and head; the sum is N.
        points: [B, Q, H, N, 2] float32, contiguous: x and y, from 0 to 1 across the image.
        weights: [B, Q, H, N] float32, contiguous.

    Returns:
        [B, Q, H * D] contiguous, dtype of value.

    Raises:
        ValueError: the shapes do not fit.
        RuntimeError: a derivative with respect to an input is computed.
    """
    if value.dim() != 4 or weights.dim() != 4:
        raise ValueError(
            f"value of shape {tuple(value.shape)} and weights of shape {tuple(weights.shape)}: must be "
            "[batch, pixels, heads, features] and [batch, queries, heads, points]"
        )
    batch, pixels, heads, _ = value.shape
    expected = (batch, weights.shape[1], heads, sum(counts))
    if weights.shape != expected or points.shape != (*expected, 2):
        raise ValueError(
            f"weights of shape {tuple(weights.shape)} and points of shape {tuple(points.shape)}: "
            f"must be {expected} and {(*expected, 2)}"
        )
    if len(shapes) != len(counts) or sum(height * width for height, width in shapes) != pixels:
        raise ValueError(
            f"shapes={list(shapes)}: must be {len(counts)} pairs (height, width) with {pixels} pixels in total"
        )
    sizes = [side for shape in shapes for side in shape]
    refuse_derivatives("deformable_attention", value, points, weights)
    return torch.ops.hf_cpu_accel.deformable_attention(value, sizes, list(counts), points, weights)


def deformable_attention_reference(
    value: Tensor, sizes: list[int], counts: list[int], points: Tensor, weights: Tensor
) -> Tensor:
    """Compute the op in PyTorch, in float64 for float64 values, else in float32."""
    precision = torch.float64 if value.dtype == torch.float64 else torch.float32
    batch, _, heads, features = value.shape
    shapes = list(zip(sizes[::2], sizes[1::2], strict=True))
    images = value.to(precision).split([height * width for height, width in shapes], dim=1)
    levels = zip(
        images,
        shapes,
        points.to(precision).split(counts, dim=3),
        weights.to(precision).split(counts, dim=3),
        strict=True,
    )
    output = torch.zeros(batch, weights.shape[1], heads, features, dtype=precision)
    for image, shape, at, weight in levels:
        if 0 in shape or not at.numel():
            continue
        maps = image.permute(0, 2, 3, 1).reshape(batch * heads, features, *shape)
        grid = (2 * at - 1).transpose(1, 2).flatten(0, 1)  # [B * H, Q, P, 2]
        sampled = torch.nn.functional.grid_sample(maps, grid, align_corners=False)
        sampled = sampled.view(batch, heads, features, *grid.shape[1:3])
        output += torch.einsum("bhdqp,bqhp->bqhd", sampled, weight)
    return output.flatten(2).to(value.dtype)


def _like_value(
    value: Tensor, sizes: list[int], counts: list[int], points: Tensor, weights: Tensor
) -> Tensor:
    return value.new_empty(value.shape[0], weights.shape[1], value.shape[2] * value.shape[3])


declare(
    "deformable_attention(Tensor value, int[] sizes, int[] counts, Tensor points, Tensor weights) -> Tensor",
    fake=_like_value,
    reference=deformable_attention_reference,
)
