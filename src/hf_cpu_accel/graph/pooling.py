"""`FastPool`: the replacement of an aggregation module that pools the nodes of each graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.aggr import Aggregation

from hf_cpu_accel.graph.accepted_arguments import INDEX_DTYPES, is_transformed
from hf_cpu_accel.graph.adjacency import Adjacency
from hf_cpu_accel.graph.propagate import is_small
from hf_cpu_accel.graph.reduction import Reduction
from hf_cpu_accel.ops.derivatives import needs_gradient
from hf_cpu_accel.ops.sparse import KERNEL_DTYPES


class FastPool:
    """Replaces `module.forward`, which stays on the class.

    Attributes:
        served: the number of calls that ran the kernels, without calls from compiled code.
    """

    def __init__(self, module: Aggregation, reduction: Reduction) -> None:
        self.module, self.reduction = module, reduction
        self.served = 0

    def __call__(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
        **kwargs: Any,
    ) -> Tensor:
        output = None
        if index is not None and ptr is None and dim_size is not None and not kwargs:
            output = self._reduce(x, index, dim_size, dim)
        if output is None:
            output = type(self.module).forward(self.module, x, index, ptr, dim_size, dim, **kwargs)
        return output

    def _reduce(self, x: Tensor, index: Tensor, groups: int, dim: int) -> Tensor | None:
        if (
            x.dim() != 2
            or dim not in (0, -2)
            or x.dtype not in KERNEL_DTYPES
            or x.layout is not torch.strided
        ):
            return None
        if index.shape != x.shape[:1] or index.dtype not in INDEX_DTYPES or x.device.type != "cpu":
            return None
        if torch.jit.is_tracing() or is_transformed() or is_small(index, x.shape[1]):
            return None
        try:
            rows = Adjacency(index, torch.arange(len(index)), groups, len(index))
        except RuntimeError:  # an index is out of range: the module raises its own error
            return None
        if not torch.compiler.is_compiling():
            self.served += 1
        transposed = rows.as_segments() if needs_gradient(x) else None
        return self.reduction.of_rows(rows.rowptr, rows.col, x, transposed)
