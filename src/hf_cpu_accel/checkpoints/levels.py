"""Approximation of a small table of levels by int8 levels with one scale and one offset.

NF4 and FP4 weights are levels times the largest magnitude of a block. The levels are not evenly spaced, so affine groups cannot
represent them exactly. But only 16 numbers have to be near a grid with a free step and start.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_STEPS = torch.linspace(128, 255, 1017, dtype=torch.float64)  # over the range of the levels
_STARTS = torch.linspace(-0.5, 0.5, 21, dtype=torch.float64)  # of a step


def nearest_grid(levels: Tensor) -> tuple[Tensor, float, float]:
    """Return (q uint8 of the shape of `levels`, step, start) with step * q + start nearest to `levels`, by least squares.

    The error is at most half of a 255th of their range. For NF4 it is at most 0.25 % of the largest level, and 0.13 % on average.

    Args:
        levels: float [n], not all equal.
    """
    q, step, start = _nearest_grid(tuple(levels.tolist()))
    return torch.tensor(q, dtype=torch.uint8), step, start


@cache
def _nearest_grid(table: tuple[float, ...]) -> tuple[list[int], float, float]:
    levels = torch.tensor(table, dtype=torch.float64)
    least, most = levels.min(), levels.max()
    steps = (levels - least) / (most - least) * _STEPS[:, None]
    q = (steps[:, None] + _STARTS[:, None]).round().clamp_(0, 255).flatten(0, 1)
    # The line through the points (q, level) with the least squares, for each candidate.
    centered, rise = q - q.mean(dim=1, keepdim=True), levels - levels.mean()
    step = (centered * rise).sum(dim=1) / centered.square().sum(dim=1)
    start = levels.mean() - step * q.mean(dim=1)
    off = (step[:, None] * q + start[:, None] - levels).square().sum(dim=1)
    best = int(off.argmin())
    return q[best].int().tolist(), step[best].item(), start[best].item()
