"""Adjacent linears in one packed weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hf_cpu_accel.ops.decoder.layers import Projection
from hf_cpu_accel.rewrite.linear.layer import PackedLinear


@dataclass(frozen=True)
class LinearRun:
    """The output features of adjacent linears in one packed weight, by their paths in the layer."""

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


def side_by_side(linears: Sequence[PackedLinear], paths: Mapping[int, str]) -> LinearRun | None:
    """Return the linears as a run, in the order of the weight, or None if they are not adjacent; `paths` are those of the
    layer's modules, by id."""
    linears = sorted(linears, key=lambda linear: linear.index)
    indices = [linear.index for linear in linears]
    if not linears or indices != list(range(indices[0], indices[0] + len(indices))):
        return None
    if any(linear.group is not linears[0].group for linear in linears):
        return None
    return LinearRun(tuple(paths[id(linear)] for linear in linears))
