"""What T5 and its like add to attention's scores for the distance of two tokens: a table per head instead of a matrix per call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.rewrite.decoder.calls import LayerCall
from hf_cpu_accel.rewrite.decoder.probe import trace

# Buckets of distances widen as they grow, up to the last one. None is known that begins after 128 tokens or so.
_FARTHEST = 8192


@dataclass(frozen=True)
class RelativeBias:
    """A parameter [buckets, heads] at `path` in a layer, and the bucket of each distance; beyond the last of them it stays."""

    path: str
    buckets: Tensor

    def table(self, layer: nn.Module) -> Tensor:
        """float32 [heads, distances], with the present values of the parameter."""
        return layer.get_parameter(self.path).detach()[self.buckets].float().T.contiguous()


class PositionBias(LazyTensor):
    """[1, heads, q_len, kv_len], as a host hands it on from layer to layer; the last query stands at the last key.

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
        # Later keys are hidden; the original has the bias of distance 0 there.
        return self.table[:, distance.clamp(0, self.table.shape[1] - 1)][None].to(self.dtype)


def read_relative_bias(layer: nn.Module, call: LayerCall) -> RelativeBias | None:
    """Where the bias of `layer`'s self-attention comes from, if each distance has its row of one of its parameters."""
    bias = trace(layer, call, past=_FARTHEST).attention[0].bias
    if bias is None or bias.shape[0] != 1:
        return None
    by_distance = bias[0, :, -1].flip(-1)  # [heads, distances]
    for path, parameter in layer.named_parameters():
        if parameter.dim() != 2 or parameter.shape[1] != by_distance.shape[0]:
            continue
        if len(torch.unique(parameter, dim=0)) != len(parameter):
            continue  # which of two rows that are the same would be a guess
        same = (parameter.detach()[:, :, None] == by_distance).all(dim=1)  # [buckets, distances]
        if not same.any(dim=0).all():
            continue
        buckets = same.int().argmax(dim=0)
        changes = (buckets.diff() != 0).nonzero()
        last = int(changes[-1]) + 1 if len(changes) else 0
        if last < _FARTHEST // 2:
            return RelativeBias(path, buckets[: last + 1].clone())
    return None
