"""Weights in affine groups: per output feature and group of input features a scale and an offset.

    weight[n, k] = scale[n, k // group] * q[n, k] + offset[n, k // group],    q from 0 to 15 ("affine4") or 255 ("affine8")

Most quantized checkpoints (GGUF, GPTQ, AWQ, HQQ and others) have this form, so their weights are packed without rounding. Nothing
is rotated, and activations have 16 bits with a scale for every 64 features. The products are those of the dequantized weights up to
about 1e-5 of the largest output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.packing.panels import PANEL_FEATURES

BITS = {"affine4": 4, "affine8": 8}
# The ranges of a group that the least-squares search tries: from its minimum to its maximum in these numbers of steps, and
# narrower.
_STEPS = {4: (15, 14, 13, 12, 11, 10, 9, 8), 8: (255,)}
_SHRUNK = (0.94, 0.88, 0.82)


@dataclass(frozen=True)
class AffineGroups:
    """A weight [N, K] in affine groups.

    Attributes:
        q: uint8 [N, K], at most 2 ** bits - 1.
        scale, offset: float32 [N, ceil(K / group)].
        bits: 4 or 8.
        group: the number of input features per scale and offset: 16, 32 or a multiple of 64.
    """

    q: Tensor
    scale: Tensor
    offset: Tensor
    bits: int
    group: int

    def __post_init__(self) -> None:
        check_group(self.group)
        rows, columns = self.q.shape
        expected = (rows, -(-columns // self.group))
        for name, values in (("scale", self.scale), ("offset", self.offset)):
            if values.shape != expected:
                raise ValueError(
                    f"{name} of shape {tuple(values.shape)} for a weight {rows} x {columns} in groups of {self.group}: "
                    f"expected {expected}"
                )

    @property
    def dtype(self) -> str:
        return f"affine{self.bits}"

    def dequantize(self) -> Tensor:
        """Return the weight [N, K] in float32, scale * q + offset."""
        columns = self.q.shape[1]
        scale = self.scale.repeat_interleave(self.group, dim=1)[:, :columns]
        offset = self.offset.repeat_interleave(self.group, dim=1)[:, :columns]
        return self.q * scale + offset

    def regroup(self, bits: int, group: int) -> AffineGroups:
        """Return the same weight with other bits and groups, without rounding.

        Args:
            bits: at least the present ones.
            group: a divisor of the present group.

        Raises:
            ValueError: fewer bits, or a group that does not divide the present one.
        """
        if bits < self.bits or self.group % group:
            raise ValueError(
                f"{bits} bits in groups of {group} would round {self.bits} bits in groups of {self.group}; "
                "use at least as many bits, and a group that divides"
            )
        times, groups = self.group // group, -(-self.q.shape[1] // group)
        scale, offset = (t.repeat_interleave(times, dim=1)[:, :groups] for t in (self.scale, self.offset))
        return AffineGroups(self.q, scale, offset, bits, group)


def check_group(group: int) -> None:
    """Raise ValueError unless the group is 16, 32 or a multiple of 64."""
    if group not in (16, 32) and (group <= 0 or group % 64):
        raise ValueError(f"group={group!r}: expected 16, 32 or a multiple of 64")


def shape_of(out_features: int, in_features: int, bits: int, group: int, *, half: bool) -> tuple[int, ...]:
    """Return the shape of packed data: [panels, groups, bits, bytes of a scale and an offset, the rest of a group's bytes].

    The kernels read the format from the third and fourth size.

    Args:
        half: whether scales and offsets are float16, else float32.
    """
    pair = 4 if half else 8
    nbytes = PANEL_FEATURES * (pair + group * bits // 8)
    return (-(-out_features // PANEL_FEATURES), -(-in_features // group), bits, pair, nbytes // (bits * pair))


def form_of(data: Tensor) -> tuple[int, int, bool]:
    """Return (bits, group, half) of packed data."""
    bits, pair, rest = (int(size) for size in data.shape[2:])
    return bits, (bits * pair * rest // PANEL_FEATURES - pair) * 8 // bits, pair == 4


def quantize(weight: Tensor, bits: int, group: int) -> AffineGroups:
    """Quantize a weight to affine groups with float16 scales and offsets, by least squares over a few ranges of each group.

    A weight on such a grid (of a dequantized GGUF file) is exact if its groups span at least half of the grid.

    Args:
        weight: [N, K] floating point, finite.
        bits: 4 or 8.
        group: 16, 32 or a multiple of 64.

    Raises:
        ValueError: another group.
    """
    check_group(group)
    rows, columns = weight.shape
    if weight.numel() == 0:
        empty = torch.zeros(rows, -(-columns // group))
        return AffineGroups(weight.to(torch.uint8), empty, empty, bits, group)
    values = weight.float()
    if columns % group:  # padded by the last value, which does not widen the range
        values = torch.cat([values, values[:, -1:].expand(-1, -columns % group)], dim=1)
    groups = values.view(rows, -1, group)
    scale, offset = best_range(groups, bits)
    q = nearest(groups, scale, offset, bits).to(torch.uint8).view(rows, -1)[:, :columns].contiguous()
    return AffineGroups(q, scale.squeeze(2), offset.squeeze(2), bits, group)


def best_range(groups: Tensor, bits: int, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the scale and offset, both [..., 1] with values of float16, with the least squared error.

    Args:
        groups: [..., group] float32.
        bits: 4 or 8.
        importance: [group], weights of the squared errors, or None for ones.
    """
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    best = torch.full_like(least, torch.inf)
    scale, offset = torch.zeros_like(least), least.half().float()
    for steps, shrunk in _ranges(bits):
        margin = (most - least) * (0.5 * (1 - shrunk))
        step = ((most - least) * (shrunk / steps)).half().float()
        start = (least + margin).half().float()
        off = nearest(groups, step, start, bits).mul_(step).add_(start).sub_(groups).square_()
        off = (off if importance is None else off.mul_(importance)).sum(-1, keepdim=True)
        better = off < best
        best, scale, offset = (
            torch.where(better, new, old) for new, old in ((off, best), (step, scale), (start, offset))
        )
    return scale, offset


def _ranges(bits: int) -> list[tuple[int, float]]:
    return [(steps, 1.0) for steps in _STEPS[bits]] + [(2**bits - 1, shrunk) for shrunk in _SHRUNK]


def nearest(values: Tensor, scale: Tensor, offset: Tensor, bits: int) -> Tensor:
    """Return the nearest q of `values` in the range of `bits`, in float32."""
    return ((values - offset) / torch.where(scale > 0, scale, 1.0)).round_().clamp_(0, 2**bits - 1)


class NotHalfError(ValueError):
    """A scale or offset is not representable in float16."""


def pack(weight: AffineGroups, *, half: bool | None = None) -> Tensor:
    """Pack the weight into bytes of whole panels, in the order in which the kernels read them.

    Args:
        half: store scales and offsets in float16 if True, float32 if False, float16 where that is exact if None.

    Raises:
        NotHalfError: `half` is True, and a scale or offset is not representable in float16.

    Returns:
        uint8 of `shape_of`. Each group has the 32 scales and 32 offsets of a panel, then the values. With 8 bits, each 4 input
        features are 128 bytes, and byte 4 f + i is feature i of output feature f. With 4 bits, each 8 input features are 128 bytes,
        with feature i in the low and feature 4 + i in the high half.
    """
    rows, columns = weight.q.shape
    group, bits = weight.group, weight.bits
    if half is not False:
        exact = _is_half(weight.scale) and _is_half(weight.offset)
        if half and not exact:
            raise NotHalfError("scale or offset is not representable in float16")
        half = exact
    data = torch.empty(shape_of(rows, columns, bits, group, half=half), dtype=torch.uint8)
    panels, groups = data.shape[:2]
    if data.numel() == 0:
        return data
    flat = data.view(panels, groups, -1)
    kind, header = (torch.float16, 128) if half else (torch.float32, 256)
    pad = -rows % PANEL_FEATURES
    for number, values in enumerate((weight.scale, weight.offset)):
        columned = F.pad(values, (0, 0, 0, pad)).view(panels, PANEL_FEATURES, groups).transpose(1, 2)
        at = number * header // 2
        flat[:, :, at : at + header // 2] = columned.to(kind).contiguous().view(torch.uint8)
    q = F.pad(weight.q, (0, -columns % group, 0, pad)).view(torch.int32)
    words = q.view(panels, PANEL_FEATURES, groups, group // 8, 2)  # four features at a time
    if bits == 4:
        words = (words[..., 0] | words[..., 1] << 4).unsqueeze(-1)
    ordered = words.permute(0, 2, 3, 4, 1)
    flat[:, :, header:] = ordered.contiguous().view(torch.uint8).view(panels, groups, -1)
    return data


def _is_half(values: Tensor) -> bool:
    return bool((values.half().float() == values).all())


def unpack(data: Tensor, out_features: int, in_features: int) -> AffineGroups:
    """Return the weight that `pack` packed."""
    bits, group, half = form_of(data)
    panels, groups = data.shape[:2]
    if data.numel() == 0:
        empty = torch.zeros(out_features, groups)
        return AffineGroups(data.new_empty(out_features, in_features), empty, empty, bits, group)
    flat = data.view(panels, groups, -1)
    kind, header = (torch.float16, 128) if half else (torch.float32, 256)
    scale, offset = (
        flat[:, :, start : start + header // 2]
        .contiguous()
        .view(kind)
        .float()
        .view(panels, groups, PANEL_FEATURES)
        .transpose(1, 2)
        .reshape(panels * PANEL_FEATURES, groups)[:out_features]
        .contiguous()
        for start in (0, header // 2)
    )
    payload = flat[:, :, header:]
    if bits == 4:
        halves = payload.reshape(panels, groups, group // 8, PANEL_FEATURES, 4)
        q = torch.stack([halves & 15, halves >> 4], dim=3).permute(0, 4, 1, 2, 3, 5)
    else:
        q = payload.reshape(panels, groups, group // 8, 2, PANEL_FEATURES, 4).permute(0, 4, 1, 2, 3, 5)
    q = q.reshape(panels * PANEL_FEATURES, groups * group)[:out_features, :in_features].contiguous()
    return AffineGroups(q, scale, offset, bits, group)
