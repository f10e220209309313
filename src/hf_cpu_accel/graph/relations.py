"""`Relations`: the edges of a graph by type and target, for layers that aggregate each type of edge separately."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hf_cpu_accel.graph.adjacency import Adjacency
from hf_cpu_accel.lazy.remember import Memo
from hf_cpu_accel.ops.sparse import Transposed, coo_to_csr, csr_transpose
from hf_cpu_accel.ops.sparse_reference import row_of_edge


class Relations:
    """Pairs of a relation and a target with an edge of this relation, sorted by relation, then by target.

    There are at most as many pairs as edges, while most of relations x targets would be empty.

    Attributes:
        rowptr, col: the CSR of the edges by pair; col are sources.
        relation: [edges] int64, the relation of each entry.
        ends: the index of the pair after the last one of each relation.
        target_rowptr, target_pairs: the CSR of the pairs by target.
    """

    def __init__(self, adjacency: Adjacency, edge_type: Tensor, count: int) -> None:
        self.sources = adjacency.sources
        types = edge_type.index_select(0, adjacency.order)
        targets = row_of_edge(adjacency.rowptr, len(types))
        # The entries are already sorted by target, and the sort is stable.
        bounds, target, order = coo_to_csr(types, targets.to(types.dtype), count, adjacency.targets)
        self.col = adjacency.col.index_select(0, order)
        self.relation = types.index_select(0, order).long()
        first = torch.ones(len(target), dtype=torch.bool)
        first[1:] = (target.diff() != 0) | (self.relation.diff() != 0)
        starts = first.nonzero().view(-1)
        self.rowptr = torch.cat([starts, torch.tensor([len(target)])]).int()
        self.ends: list[int] = torch.searchsorted(starts, bounds[1:].long()).tolist()
        self._target = target.index_select(0, starts)
        pairs = torch.arange(len(starts), dtype=torch.int32)
        self.target_rowptr, self.target_pairs, _ = coo_to_csr(
            self._target, pairs, adjacency.targets, len(starts)
        )
        self._transposed: Transposed | None = None

    def transposed(self) -> Transposed:
        """Return the CSR of the edges by source."""
        if self._transposed is None:
            self._transposed = csr_transpose(self.rowptr, self.col, self.sources)
        return self._transposed

    def by_pair(self) -> Transposed:
        """Return the transposed matrix of the pairs by target: pair p belongs to its target."""
        every = torch.arange(len(self._target) + 1, dtype=torch.int32)
        return every, self._target, every[:-1]


class RelationsCache:
    """A cache of the relations of each adjacency, for the last tensor of types used with it."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Adjacency, Memo] = WeakKeyDictionary()

    def get(self, adjacency: Adjacency, edge_type: Tensor, count: int) -> Relations:
        """Return the relations of a graph with `count` types of edges.

        Raises:
            RuntimeError: a type is negative or not below `count`.
        """
        memo = self._known.get(adjacency)
        if memo is None:
            memo = self._known[adjacency] = Memo(most=1)
        return memo.get(edge_type, count, lambda: Relations(adjacency, edge_type, count), by_sample=True)


relations = RelationsCache()
"""The relations of this process."""
