"""The reductions of an aggregation module of PyTorch Geometric, as names of the op `message_reduce`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import aggr

from hf_cpu_accel.ops.messages.messages import message_reduce
from hf_cpu_accel.ops.sparse import Transposed, spmm_reduce

_NAMES: dict[type[nn.Module], str] = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MinAggregation: "min",
    aggr.MaxAggregation: "max",
    aggr.VarAggregation: "var",
    aggr.StdAggregation: "std",
}


@dataclass(frozen=True)
class Reduction:
    """The reductions of a layer's messages, and the module that combines them into one tensor.

    Attributes:
        names: the names in `message_reduce`, without duplicates.
        module: combines the reductions, and scales them by degree; None for a single reduction.
    """

    names: tuple[str, ...]
    module: nn.Module | None = None

    @property
    def plain(self) -> str | None:
        """The name of the single reduction if `spmm_reduce` has it, else None."""
        return (
            self.names[0] if self.module is None and self.names[0] in ("sum", "mean", "min", "max") else None
        )

    @property
    def op(self) -> str:
        """The name of the op that `of_rows` calls."""
        return "message_reduce" if self.plain is None else "spmm_reduce"

    def of_rows(self, rowptr: Tensor, rows: Tensor, x: Tensor, transposed: Transposed | None) -> Tensor:
        """Reduce the rows of x that each node refers to.

        Args:
            rowptr, rows: int32 [nodes + 1] and [entries], a CSR without values.
            x: [N, ..., K].
            transposed: the transposed CSR if autograd records x, else None.

        Returns:
            [nodes, ..., features].
        """
        flat = x if x.dim() == 2 else x.flatten(1)
        if self.plain is not None:
            output = spmm_reduce(rowptr, rows, None, flat, self.plain, transposed=transposed)
            return output.view(-1, *x.shape[1:])
        reduced = message_reduce(rowptr, rows, flat, self.names, transposed=transposed)
        outputs = reduced.view(-1, len(self.names), *x.shape[1:]).unbind(1)
        return self.combine(list(outputs), rowptr.diff())

    def combine(self, outputs: list[Tensor], degree: Tensor) -> Tensor:
        """Combine the reductions, each [nodes, ..., features], into the module's output; degree is int32 [nodes]."""
        if self.module is None:
            return outputs[0]
        if not isinstance(self.module, aggr.DegreeScalerAggregation):
            return _combine_inner(self.module, self.names, outputs)
        inner = _combine_inner(self.module.aggr, self.names, outputs)
        shape = (-1, *[1] * (inner.dim() - 1))
        scales = degree_scales(self.module, degree, inner.dtype)
        scaled = [inner if scale is None else inner * scale.view(shape) for scale in scales]
        return torch.cat(scaled, dim=-1) if len(scaled) > 1 else scaled[0]

    def __str__(self) -> str:
        return ", ".join(self.names)


def _combine_inner(module: nn.Module, names: tuple[str, ...], outputs: list[Tensor]) -> Tensor:
    if not isinstance(module, aggr.MultiAggregation):
        return outputs[0]
    by_name = dict(zip(names, outputs, strict=True))
    return module.combine([by_name[_NAMES[type(part)]] for part in module.aggrs])


def degree_scales(
    module: aggr.DegreeScalerAggregation, degree: Tensor, dtype: torch.dtype
) -> list[Tensor | None]:
    """Return the factor of each node for each scaler of `module`; None for the identity.

    Corso et al. 2020, arXiv:2004.05718: the logarithm of the degree over its mean in the training set, and its inverse.
    """
    degrees = degree.to(dtype)
    at_least_one = degrees.clamp(min=1)
    scales = {
        "identity": lambda: None,
        "amplification": lambda: torch.log(degrees + 1) / module.avg_deg_log,
        "attenuation": lambda: module.avg_deg_log / torch.log(at_least_one + 1),
        "linear": lambda: degrees / module.avg_deg_lin,
        "inverse_linear": lambda: module.avg_deg_lin / at_least_one,
    }
    return [scales[name]() for name in module.scaler]


def read_reduction(module: nn.Module | None) -> Reduction | None:
    """Return the reductions of `module`; None if it has others, or changes their gradients."""
    names = _names_of(module)
    if names is None:
        return None
    return Reduction(names, None if type(module) in _NAMES else module)


def _names_of(module: Any) -> tuple[str, ...] | None:
    if type(module) is aggr.DegreeScalerAggregation:
        supported = all(
            name in ("identity", "amplification", "attenuation", "linear", "inverse_linear")
            for name in module.scaler
        )
        return _names_of(module.aggr) if supported else None
    parts = list(module.aggrs) if type(module) is aggr.MultiAggregation else [module]
    names = []
    for part in parts:
        variance = part.var_aggr if type(part) is aggr.StdAggregation else part
        if type(part) not in _NAMES or getattr(variance, "semi_grad", False):
            return None
        names.append(_NAMES[type(part)])
    return tuple(dict.fromkeys(names))
