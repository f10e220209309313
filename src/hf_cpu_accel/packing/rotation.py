"""The rotation H between input and weight of int8 products: x W^T = (x H) (W H / 16)^T.

Transformers have a few features that are far larger than the others in every row. The range of the row, and so the step that
all its features are rounded with, is theirs. H mixes each feature with 15 others: the large ones are spread out, rows and
weights both get values of like size, and rounding costs a third to a half of what it costs without (benchmarks/history/2026-11.md).
The model's answers need no correction for it, since H H = 16, and no data is needed to choose it (Ashkboos et al. 2024, QuaRot,
arXiv:2404.00456).

In each whole block of BLOCK features, the features i, i + 8, ..., i + 120 (for each i < 8) are multiplied by R (x) R with

        1  1  1 -1
    R = 1  1 -1  1
        1 -1  1  1
       -1  1  1  1

a Hadamard matrix of order 16 whose rows all add up to 4: a level that all features have in common stays one, where the usual
Walsh-Hadamard matrix would collect it in a single feature. Features behind the last whole block are multiplied by 4, which is
the factor by which H makes every row longer.
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
    """x [..., K] float32 or float64, times H."""
    return _times(x, _H, SQUARE**0.5)


def rotate_back(x: Tensor) -> Tensor:
    """The inverse of `rotate`."""
    return _times(x, _H / SQUARE, SQUARE**-0.5)  # powers of two: nothing is rounded otherwise than by H


def _times(x: Tensor, matrix: Tensor, rest: float) -> Tensor:
    """Whole blocks times `matrix`, the features behind them times `rest`."""
    whole = x.shape[-1] // BLOCK * BLOCK
    blocks = x[..., :whole].unflatten(-1, (whole // BLOCK, BLOCK))
    turned = (blocks @ matrix.to(x.dtype)).flatten(-2)
    return turned if whole == x.shape[-1] else torch.cat([turned, x[..., whole:] * rest], dim=-1)
