"""What the families draw from: sizes around those that kernels cut at, dtypes, vectors that may be missing, and memory layouts."""

from __future__ import annotations

import random

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16)
# Kernel and reference both round, and may do so to either side of a value in the middle: a whole step of 8 bits.
BFLOAT16_ROUNDING = 2.0**-7


def size(rng: random.Random, most: int = 140) -> int:
    """Small, near a multiple of a vector or a panel, or anything."""
    near = rng.choice((16, 32, 64, 96, 128)) + rng.choice((-1, 0, 0, 1))
    return max(1, min(most, rng.choice((rng.randint(1, 8), near, rng.randint(1, most)))))


def floats(rng: random.Random) -> torch.dtype:
    return rng.choice(FLOATS)


def vector(rng: random.Random, length: int, factor: float = 1.0) -> Tensor | None:
    return (factor * torch.randn(length)).to(floats(rng)) if rng.random() < 0.7 else None


def laid_out(rng: random.Random, x: Tensor) -> Tensor:
    """The same values: dense, as the columns of something wider, turned, or with gaps."""
    way = rng.choice(("dense", "dense", "wider", "turned", "gaps"))
    if way == "wider":
        return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
    if way == "turned" and x.dim() > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if way == "gaps":
        return torch.stack([x, x], dim=-1)[..., 0]
    return x


def rows(rng: random.Random, features: int, *, least: int = 0) -> Tensor:
    """[.., features] of one to three dimensions, float32 or bfloat16, in any layout."""
    leading = [max(least, rng.choice((0, 1, rng.randint(1, 9), rng.randint(1, 70))))]
    if rng.random() < 0.3:
        leading.insert(0, rng.randint(1, 3))
    return laid_out(rng, torch.randn(*leading, features).to(floats(rng)))


def rounding(*tensors: Tensor) -> float:
    """What a bound grows by where one of them is bfloat16."""
    return BFLOAT16_ROUNDING * any(x.dtype is torch.bfloat16 for x in tensors)
