"""Winograd's convolution F(2 x 2, 3 x 3) (Lavin & Gray 2015, arXiv:1509.09308): 4 multiplications per output pixel of a 3 x 3
window with stride 1, instead of 9.

The image is cut into overlapping tiles of 4 x 4 pixels with stride 2. Each tile gives 2 x 2 output pixels:

    output = A^T [(G weight G^T) * (B^T tile B)] A

with * elementwise and a sum over the channels, so the 16 positions of a tile are 16 matrix products. Rounding the transformed
values to bfloat16 adds about 1.5 times the error of rounding weight and image (benchmarks/history/2026-11.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 4  # of a tile, in pixels
POSITIONS = SIDE * SIDE


def _matrix(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32, device="cpu")


_B = _matrix((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
_G = _matrix((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))
_A = _matrix((1, 1, 1, 0), (0, 1, -1, -1))
# The middle number of a column of the weight is the difference of the two middle ones of the 4 numbers of G weight.
_G_INVERSE = _matrix((1, 0, 0, 0), (0, 1, -1, 0), (0, 0, 0, 1))


def transform_weight(weight: Tensor) -> Tensor:
    """Compute G weight G^T of a weight [N, C, 3, 3]: [POSITIONS, N, C], float32."""
    both_sides = torch.kron(_G, _G)  # for the 9 numbers of a window as one vector
    return (weight.detach().float().flatten(2) @ both_sides.T).permute(2, 0, 1)


def recover_weight(transformed: Tensor) -> Tensor:
    """Compute the inverse of `transform_weight`, up to rounding."""
    both_sides = torch.kron(_G_INVERSE, _G_INVERSE)
    return (transformed.float().permute(1, 2, 0) @ both_sides.T).unflatten(2, (3, 3))


def convolve(
    images: Tensor, transformed: Tensor, padding: tuple[int, int], rounded: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute the convolution in PyTorch.

    Args:
        images: [B, C, H, W] float32.
        transformed: [POSITIONS, N, C] float32, from `transform_weight`.
        padding: (height, width) of zeros.
        rounded: a function that rounds the input [..., C] of the products.

    Returns:
        [B, N, H + 2 * padding height - 2, W + 2 * padding width - 2] float32.
    """
    rows, columns = padding
    height, width = images.shape[2] + 2 * rows - 2, images.shape[3] + 2 * columns - 2
    padded = F.pad(images, (columns, columns + width % 2, rows, rows + height % 2))
    tiles = padded.unfold(2, SIDE, 2).unfold(3, SIDE, 2)  # [B, C, down, across, 4, 4]
    inputs = rounded((_B @ tiles @ _B.T).flatten(-2).movedim(1, -1))
    products = torch.einsum("byxpc,pnc->bnyxp", inputs, transformed)
    outputs = _A @ products.unflatten(-1, (SIDE, SIDE)) @ _A.T  # [B, N, down, across, 2, 2]
    return outputs.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, :height, :width]
