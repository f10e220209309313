"""The rotation H between input and weight of int8 products: x W^T = (x H) (W H / 16)^T.

In transformers a few features are far larger than the others in every row. They determine the range of the row, and so the step
that all its features are rounded to. H mixes each feature with 15 others, so that rows and weights have values of similar size.
Rounding errors are then a third to a half (benchmarks/history/2026-11.md). The product is unchanged, since H H = 16, and H needs no
calibration data (Ashkboos et al. 2024, QuaRot, arXiv:2404.00456).

In each whole block of BLOCK features, the features i, i + 8, ..., i + 120 (for each i < 8) are multiplied by R (x) R with

        1  1  1 -1
    R = 1  1 -1  1
        1 -1  1  1
       -1  1  1  1

a Hadamard matrix of order 16 whose rows all sum to 4. It maps a constant vector to a constant one, while the usual Walsh-Hadamard
matrix would move it into a single feature. Features after the last whole block are multiplied by 4, the factor by which H scales
the norm of every row.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
SQUARE = 16  # H H is this times the identity

_R = 1 - 2 * torch.eye(4).flip(0)
# Of one block; dense, since a matrix product is fastest.
_H = torch.kron(torch.kron(_R, _R), torch.eye(BLOCK // SQUARE))


def rotate(x: Tensor) -> Tensor:
    """Multiply x [..., K], float32 or float64, by H."""
    return _times(x, _H, SQUARE**0.5)


def rotate_back(x: Tensor) -> Tensor:
    """Compute the inverse of `rotate`."""
    return _times(x, _H / SQUARE, SQUARE**-0.5)  # powers of two, which are exact


def _times(x: Tensor, matrix: Tensor, rest: float) -> Tensor:
    """Multiply whole blocks by `matrix`, and the features after them by `rest`."""
    end = x.shape[-1] // BLOCK * BLOCK
    blocks = x[..., :end].unflatten(-1, (end // BLOCK, BLOCK))
    rotated = (blocks @ matrix.to(x.dtype)).flatten(-2)
    return rotated if end == x.shape[-1] else torch.cat([rotated, x[..., end:] * rest], dim=-1)
