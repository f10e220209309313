"""Linears that lie side by side in one packed weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hf_cpu_accel.ops.decoder.layers import Projection
from hf_cpu_accel.rewrite.linear.layer import PackedLinear


@dataclass(frozen=True)
class LinearRun:
    """The output features of linears that lie side by side in one packed weight, by their paths in the layer."""

    paths: tuple[str, ...]

    def projection(self, layer: nn.Module) -> Projection:
        linears = self.linears(layer)
        indices = [linear.index for linear in linears]
        packed, bias = linears[0].group.weight(min(indices), max(indices))
        return Projection(packed, bias)

    def linears(self, layer: nn.Module) -> tuple[PackedLinear, ...]:
        linears = tuple(layer.get_submodule(path) for path in self.paths)
        assert all(isinstance(linear, PackedLinear) for linear in linears)
        return linears  # type: ignore[return-value]
