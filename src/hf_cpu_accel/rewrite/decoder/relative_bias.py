"""Find the source of a decoder layer's bias of distances, as in T5: one of its parameters, identified from the scores of a
forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_cpu_accel.rewrite.decoder.calls import LayerCall
from hf_cpu_accel.rewrite.decoder.probe import record

# Buckets of distances widen up to the last one. In all known models it begins before about 128 tokens.
_FARTHEST = 8192


@dataclass(frozen=True)
class RelativeBias:
    """A parameter [buckets, heads] at `path` in a layer, and the bucket of each distance; larger distances use the last bucket."""

    path: str
    buckets: Tensor

    def table(self, layer: nn.Module) -> Tensor:
        """Return the table float32 [heads, distances], with the current values of the parameter."""
        return layer.get_parameter(self.path).detach()[self.buckets].float().T.contiguous()


def read_relative_bias(layer: nn.Module, call: LayerCall) -> RelativeBias | None:
    """Return the source of the bias of `layer`'s self-attention, if each distance has its row of one of its parameters, or None."""
    bias = record(layer, call, past=_FARTHEST).attention[0].bias
    if bias is None or bias.shape[0] != 1:
        return None
    by_distance = bias[0, :, -1].flip(-1)  # [heads, distances]
    for path, parameter in layer.named_parameters():
        if parameter.dim() != 2 or parameter.shape[1] != by_distance.shape[0]:
            continue
        if len(torch.unique(parameter, dim=0)) != len(parameter):
            continue  # two equal rows would be ambiguous
        same = (parameter.detach()[:, :, None] == by_distance).all(dim=1)  # [buckets, distances]
        if not same.any(dim=0).all():
            continue
        buckets = same.int().argmax(dim=0)
        changes = (buckets.diff() != 0).nonzero()
        last = int(changes[-1]) + 1 if len(changes) else 0
        if last < _FARTHEST // 2:
            return RelativeBias(path, buckets[: last + 1].clone())
    return None
