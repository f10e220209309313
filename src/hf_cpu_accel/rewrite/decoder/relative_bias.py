"""Where a decoder layer has the bias of each distance from, as T5 has: one of its parameters, told by the scores of a forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_cpu_accel.rewrite.decoder.calls import LayerCall
from hf_cpu_accel.rewrite.decoder.probe import record

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


def read_relative_bias(layer: nn.Module, call: LayerCall) -> RelativeBias | None:
    """Where the bias of `layer`'s self-attention comes from, if each distance has its row of one of its parameters."""
    bias = record(layer, call, past=_FARTHEST).attention[0].bias
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
