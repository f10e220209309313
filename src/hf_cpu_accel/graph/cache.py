"""Remembers the adjacency of the last few graphs, so that the layers of a model and the epochs of a training share it."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.graph.adjacency import Adjacency
from hf_cpu_accel.lazy.remember import Memo

MOST_GRAPHS = 16


class AdjacencyCache:
    """Adjacencies by the tensor that they were made of, as `Memo` knows it again: at most MOST_GRAPHS, the last ones used.

    Writes that go past torch (numpy, `.data`) are noticed if they are to the whole tensor: `clear` is for others.
    """

    def __init__(self) -> None:
        self._memo = Memo(MOST_GRAPHS)

    def get(self, edge_index: Tensor, flow: str, targets: int, sources: int, loops: int = -1) -> Adjacency:
        """The adjacency of edge_index [2, E], of which row 1 are the targets if `flow` is "source_to_target", and row 0 otherwise.

        Raises:
            RuntimeError: an index is negative or out of range.
        """
        target, source = (1, 0) if flow == "source_to_target" else (0, 1)
        if torch.compiler.is_compiling():  # no identity
            return Adjacency(edge_index[target], edge_index[source], targets, sources, loops)

        def make() -> Adjacency:
            plain = edge_index.as_subclass(Tensor)
            return Adjacency(plain[target], plain[source], targets, sources, loops)

        return self._memo.get(edge_index, (flow, targets, sources, loops), make, by_sample=True)

    def clear(self) -> None:
        """Forget all graphs."""
        self._memo.clear()

    def __len__(self) -> int:
        return len(self._memo)


adjacencies = AdjacencyCache()
"""The graphs of this process."""
