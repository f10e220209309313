"""The relative position bias of decoders such as T5's, as a table per head instead of a matrix per call."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor


class PositionBias(LazyTensor):
    """[1, heads, q_len, kv_len], as passed from layer to layer; the last query is at the last key.

    Attributes:
        table: [heads, distances] as in `ops.decoder_layers.SelfAttention.relative`, or None for zeros.
    """

    table: Tensor | None

    @classmethod
    def of(
        cls, table: Tensor | None, heads: int, q_len: int, kv_len: int, dtype: torch.dtype
    ) -> PositionBias:
        bias: PositionBias = cls.like((1, heads, q_len, kv_len), dtype)
        bias.table = table
        return bias

    def _make(self) -> Tensor:
        _, heads, q_len, kv_len = self.shape
        if self.table is None:
            return torch.zeros(1, heads, q_len, kv_len, dtype=self.dtype)
        distance = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
        # Later keys are masked; the original bias has distance 0 there.
        return self.table[:, distance.clamp(0, self.table.shape[1] - 1)][None].to(self.dtype)
