"""The relative position bias of encoders such as T5's, as a table per head instead of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor

# The number of tokens of the bias from which a table is read. No known model has biases that change beyond 128 tokens.
TOKENS = 192
_FARTHEST = 150
# The number of distances on both sides with their own entry: the kernel reads consecutive entries faster than one repeatedly.
_ROOM = 512


class DistanceBias(LazyTensor):
    """[1, heads, L, L], as passed from layer to layer.

    Attributes:
        table: float32 [heads, 2n + 1] as in `ops.encoder_layer`.
    """

    table: Tensor

    @classmethod
    def of(cls, table: Tensor, length: int, dtype: torch.dtype) -> DistanceBias:
        bias: DistanceBias = cls.like((1, table.shape[0], length, length), dtype)
        bias.table = table
        return bias

    def _make(self) -> Tensor:
        farthest, position = self.table.shape[1] // 2, torch.arange(self.shape[2])
        distance = position - position[:, None]
        return self.table[:, distance.clamp(-farthest, farthest) + farthest][None].to(self.dtype)


def table_of(bias: Tensor) -> Tensor | None:
    """Return the table of a bias [1, heads, TOKENS, TOKENS] of distances only that is constant for large ones, or None."""
    if bias.shape[0] != 1 or bias.shape[2:] != (TOKENS, TOKENS):
        return None
    behind, ahead = bias[0, :, -1].float(), bias[0, :, 0].float()  # of the last and the first token
    table = torch.cat([behind, ahead[:, 1:]], dim=1)
    if not torch.equal(DistanceBias.of(table, TOKENS, bias.dtype).tensor, bias):
        return None
    middle = TOKENS - 1
    if (table[:, : middle - _FARTHEST] != table[:, :1]).any() or (
        table[:, middle + _FARTHEST :] != table[:, -1:]
    ).any():
        return None
    more = _ROOM - middle
    first, last = (table[:, end, None].expand(-1, more) for end in (0, -1))
    return torch.cat([first, table, last], dim=1).contiguous()
