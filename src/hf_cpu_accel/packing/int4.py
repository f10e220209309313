"""4-bit weights: one of 16 levels per value, a small integer per group of input features, a float per output feature.

    weight[n, k] = scale[n] * multiplier[n, k // group] * LEVELS[index[n, k]]

multiplier * level is an integer of at most 120, so a weight is an int8 weight stored in 4 bits (plus 8 per group). Products with
8-bit activations are exact integers, and many rows run at the speed of int8 (W4A8). The activations are rotated and quantized as
for int8. Two-step scales are from QServe (Lin et al. 2024, arXiv:2405.04532).

The levels are denser in the middle, since rotated weights are nearly normally distributed: evenly spaced levels have 5 to 7 % more
error. Multipliers have a sign, and the levels reach further below zero than above, so the largest value of a group can be on the
side with more room.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUPS = (32, 64, 128)  # input features that share a multiplier
LEVELS = (-10, -8, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 9)
LARGEST_MULTIPLIER = 12
ZERO = LEVELS.index(0)

# The largest weight of a row is this many steps of its scale: a little more than 10 * 12, which clips it for less error in the
# rest.
_LARGEST = 127.0
# Multipliers tried per sign, from the one that makes a group's largest value this level.
_TRIED, _FROM_LEVEL = 4, (10.5, 9.5)


def check_group(group: int) -> None:
    """Raise ValueError unless the group is in GROUPS."""
    if group not in GROUPS:
        raise ValueError(f"group={group!r}: expected one of {', '.join(map(str, GROUPS))}")


def quantize(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nearest 4-bit weight, with a scale from the largest value of each row.

    Args:
        weight: [N, K] float32, finite; K divisible by group.

    Returns:
        index uint8 [N, K], multiplier int8 [N, K / group], float32 [2, N] (scales; sums of multiplier * level).
    """
    out_features, in_features = weight.shape
    if in_features == 0:
        index, multiplier = (torch.empty(out_features, 0, dtype=dtype) for dtype in (torch.uint8, torch.int8))
        return index, multiplier, torch.zeros(2, out_features)
    scale = row_scales(weight)
    groups = weight.view(out_features, in_features // group, group)
    steps = groups / torch.where(scale > 0, scale, 1.0)[:, None, None]
    multiplier = best_multipliers(steps)
    levels = nearest(steps / multiplier)
    sums = (levels_of(levels) * multiplier).sum(dim=(1, 2))
    index = levels.add_(ZERO).to(torch.uint8).view(out_features, in_features)
    return index, multiplier.squeeze(2).to(torch.int8), torch.stack([scale, sums])


def best_multipliers(steps: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return the multipliers with the least squared error, float32 [..., 1].

    Args:
        steps: groups of weights [..., group], divided by the scales of their rows.
        importance: [group], weights of the squared errors, or None for ones.
    """
    low, high = steps.amin(dim=-1, keepdim=True), steps.amax(dim=-1, keepdim=True)
    largest = torch.maximum(-low, high)
    best = torch.full_like(largest, torch.inf)
    multiplier = torch.zeros_like(largest)
    # LEVELS[0] is the largest level in magnitude; it is used by the largest value if that has the sign opposite to the multiplier.
    outward = torch.where(-low >= high, 1.0, -1.0)
    for sign, level in zip((outward, -outward), _FROM_LEVEL, strict=True):
        first = torch.floor(largest / level).clamp_(1, LARGEST_MULTIPLIER)
        for more in range(_TRIED):
            candidate = (first + more).clamp_(max=LARGEST_MULTIPLIER).mul_(sign)
            error = levels_of(nearest(steps / candidate)).mul_(candidate).sub_(steps).square_()
            error = (error if importance is None else error.mul_(importance)).sum(-1, keepdim=True)
            better = error < best
            best = torch.where(better, error, best)
            multiplier = torch.where(better, candidate, multiplier)
    return multiplier


def row_scales(weight: Tensor) -> Tensor:
    """Return the scales [N] of the rows of `weight` [N, K], from the largest value of each row."""
    return weight.abs().amax(dim=1) / _LARGEST


def nearest(values: Tensor) -> Tensor:
    """Return index - ZERO of the level nearest to each value. Beyond 5 and -6 levels are two apart."""
    half = values * 0.5
    bent = torch.maximum(torch.minimum(values, half + 2.5), half.sub_(3))
    return bent.round_().clamp_(-ZERO, len(LEVELS) - 1 - ZERO)


def levels_of(index: Tensor) -> Tensor:
    """Return LEVELS[index + ZERO]."""
    double = index * 2
    return torch.minimum(torch.maximum(index, double - 5), double.add_(6))


def pack(index: Tensor, multiplier: Tensor, group: int) -> Tensor:
    """The bytes of whole panels, in the order in which the kernels read them.

    Args:
        index: uint8 [32 P, K].
        multiplier: int8 [32 P, K / group].

    Returns:
        uint8 [P, K / group, 32 + 16 group]: the multipliers of a group, then 128 bytes for every 8 input features: byte 4 f + i
        holds feature i of them for output feature f in its low half and feature 4 + i in its high half.
    """
    panels, groups, pairs = index.shape[0] // 32, index.shape[1] // group, group // 8
    if groups == 0:
        return index.new_empty((panels, 0, 32 + 128 * pairs))
    words = index.view(torch.int32).view(panels, 32, groups, pairs, 2)  # four features at a time
    halves = (words[..., 0] | words[..., 1] << 4).permute(0, 2, 3, 1).contiguous()
    data = index.new_empty((panels, groups, 32 + 128 * pairs))
    data[:, :, :32] = multiplier.view(torch.uint8).view(panels, 32, groups).transpose(1, 2)
    data[:, :, 32:] = halves.view(torch.uint8).view(panels, groups, 128 * pairs)
    return data


def unpack(data: Tensor) -> Tensor:
    """multiplier * level of all weights of `pack`'s result: int8 [32 P, K]."""
    panels, groups, _ = data.shape
    multiplier = data[:, :, :32].view(torch.int8).view(panels, groups, 1, 32, 1)
    halves = data[:, :, 32:].view(panels, groups, -1, 32, 4)
    index = torch.stack([halves & 15, halves >> 4], dim=3)  # [panels, groups, words, 2, 32, 4]
    values = torch.tensor(LEVELS, dtype=torch.int8)[index.int()] * multiplier.unsqueeze(2)
    return values.permute(0, 4, 1, 2, 3, 5).reshape(panels * 32, -1)
