"""`Adjacency`: the edges of a graph in compressed sparse rows, with what is derived from them and worth keeping."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from hf_cpu_accel.ops.sparse import Transposed, coo_to_csr, csr_transpose
from hf_cpu_accel.ops.sparse_reference import row_of_edge


class Adjacency:
    """Edges sorted by target.

    Attributes:
        rowptr, col, order: as `ops.sparse.coo_to_csr` gives them.
        targets, sources: how many nodes there are on each side.
        edges: how many edges were given, before loops were dropped and added.
        loops: how many loops were added, -1 if self-loops are as they were given.
    """

    def __init__(self, target: Tensor, source: Tensor, targets: int, sources: int, loops: int = -1) -> None:
        self.targets, self.sources, self.loops = targets, sources, loops
        self.edges = target.shape[0]
        self.rowptr, self.col, self.order = coo_to_csr(target, source, targets, sources, loops=loops)
        self._transposed: Transposed | None = None
        self._as_segments: Transposed | None = None
        self._normalized: Tensor | None = None
        self._sorted: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def transposed(self) -> Transposed:
        """The graph with its edges turned round, for gradients."""
        if self._transposed is None:
            self._transposed = csr_transpose(self.rowptr, self.col, self.sources)
        return self._transposed

    def as_segments(self) -> Transposed:
        """The transposed matrix of `order`, by which messages in the order of the edges are reduced: edge e goes to its target."""
        if self._as_segments is None:
            target = torch.empty_like(self.order)
            target[self.order.long()] = row_of_edge(self.rowptr, self.edges).int()
            every = torch.arange(self.edges + 1, dtype=torch.int32)
            position = torch.empty_like(self.order)
            position[self.order.long()] = every[:-1]
            self._as_segments = every, target, position
        return self._as_segments

    def sort(self, value: Tensor) -> Tensor:
        """`value` [edges, ...] in the order of the entries; kept for the last one that has no gradient. Not for added loops."""
        known = self._sorted
        if known is not None and known[0]() is value and known[1] == value._version:
            return known[2]
        ordered = value.index_select(0, self.order)
        if not (value.requires_grad or value.is_inference() or torch.compiler.is_compiling()):
            self._sorted = weakref.ref(value), value._version, ordered
        return ordered

    def normalized(self) -> Tensor:
        """[entries] 1 / sqrt(degree of source * degree of target), as GCN weighs edges: Kipf & Welling 2017, arXiv:1609.02907.

        Only for graphs with as many sources as targets.
        """
        if self._normalized is None:
            degree = self.rowptr.diff()
            inverse = degree.float().pow(-0.5).masked_fill(degree == 0, 0.0)
            targets = row_of_edge(self.rowptr, self.col.shape[0])
            self._normalized = inverse.index_select(0, targets).mul_(inverse.index_select(0, self.col))
        return self._normalized
