"""`Adjacency`: the edges of a graph in compressed sparse rows (CSR), with cached derived matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.lazy.remember import Memo
from hf_cpu_accel.ops.sparse import Transposed, coo_to_csr, csr_transpose, spmm_reduce
from hf_cpu_accel.ops.sparse_reference import row_of_edge

# Cached tensors of edge weights: the layers of a model use the same weights, or one set per layer.
_MOST_WEIGHTS = 2


class Adjacency:
    """Edges sorted by target.

    Attributes:
        rowptr, col, order: from `ops.sparse.coo_to_csr`.
        targets, sources: the number of nodes on each side.
        edges: the number of input edges, before loops were removed and added.
        loops: the number of added loops, or -1 if the self-loops of the input are unchanged.
    """

    def __init__(self, target: Tensor, source: Tensor, targets: int, sources: int, loops: int = -1) -> None:
        self.targets, self.sources, self.loops = targets, sources, loops
        self.edges = target.shape[0]
        self.rowptr, self.col, self.order = coo_to_csr(target, source, targets, sources, loops=loops)
        self._transposed: Transposed | None = None
        self._as_segments: Transposed | None = None
        self._normalized, self._sorted = Memo(1 + _MOST_WEIGHTS), Memo(_MOST_WEIGHTS)

    def transposed(self) -> Transposed:
        """Return the transposed graph, for gradients."""
        if self._transposed is None:
            self._transposed = csr_transpose(self.rowptr, self.col, self.sources)
        return self._transposed

    def as_segments(self) -> Transposed:
        """Return the transposed matrix of `order`, for gradients of a reduction of messages in the order of the input edges."""
        if self._as_segments is None:
            target = torch.empty_like(self.order)
            target[self.order.long()] = row_of_edge(self.rowptr, self.edges).int()
            every = torch.arange(self.edges + 1, dtype=torch.int32)
            position = torch.empty_like(self.order)
            position[self.order.long()] = every[:-1]
            self._as_segments = every, target, position
        return self._as_segments

    def sort(self, value: Tensor) -> Tensor:
        """Return `value` [edges, ...] in the order of the entries, cached if it has no gradient. Not for added loops."""
        if value.requires_grad:
            return value.index_select(0, self.order)
        return self._sorted.get(value, None, lambda: value.index_select(0, self.order), by_sample=True)

    def normalized(self, edge_index: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Return the weights of GCN, weight / sqrt(degree of source * degree of target), cached (Kipf & Welling 2017,
        arXiv:1609.02907).

        A degree is the sum of the weights of a row. An added loop has weight one, or that of the loop of `edge_index` that it
        replaces. Only for graphs with as many sources as targets.

        Args:
            edge_index: [2, edges], needed with `weight`.
            weight: [edges], or None for ones.

        Returns:
            [entries] float32.
        """
        key = self.rowptr if weight is None else weight
        return self._normalized.get(key, None, lambda: self._normalize(edge_index, weight), by_sample=True)

    def _normalize(self, edge_index: Tensor | None, weight: Tensor | None) -> Tensor:
        targets = row_of_edge(self.rowptr, self.col.shape[0])
        if edge_index is None or weight is None:
            degree, value = self.rowptr.diff().float(), None
        else:
            value = self._with_loops(edge_index, weight.float()).index_select(0, self.order)
            degree = spmm_reduce(self.rowptr, None, None, value.unsqueeze(1)).squeeze(1)
        inverse = degree.pow(-0.5)
        inverse.masked_fill_(inverse == float("inf"), 0.0)
        normalized = inverse.index_select(0, self.col)
        if value is not None:
            normalized.mul_(value)
        return normalized.mul_(inverse.index_select(0, targets))

    def _with_loops(self, edge_index: Tensor, weight: Tensor) -> Tensor:
        if self.loops < 0:
            return weight
        source, target = edge_index
        is_loop = source == target
        loops = weight.new_ones(self.loops)
        loops[source[is_loop].long()] = weight[is_loop]
        return torch.cat([weight, loops])
