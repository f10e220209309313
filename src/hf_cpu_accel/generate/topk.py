"""Find the largest of many scores."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return `torch.topk(scores, count)` of float32 scores [rows, n]: the values and their places, [rows, count].

    torch partially sorts all n. Here only the blocks of 64 whose maximum is among the largest are searched, since no other block
    can hold one of them. torch decides the order of equal scores.
    """
    rows, n = scores.shape
    blocks = n // _BLOCK
    if blocks < 4 * count:
        best = torch.topk(scores, count)
        return best.values, best.indices
    whole = blocks * _BLOCK
    maxima = scores[:, :whole].view(rows, blocks, _BLOCK).amax(dim=-1)
    # One block more than needed, which shows whether the last of the largest has an equal.
    first = torch.topk(maxima, count + 1).indices * _BLOCK
    places = (first[:, :, None] + torch.arange(_BLOCK)).view(rows, -1)
    if whole < n:
        places = torch.cat([places, torch.arange(whole, n).expand(rows, -1)], dim=1)
    candidates = torch.topk(scores.gather(1, places), count + 1)
    values = candidates.values
    if (values.diff(dim=1) < 0).all():  # all different, and no NaN among them
        return values[:, :count], places.gather(1, candidates.indices[:, :count])
    best = torch.topk(scores, count)
    return best.values, best.indices
