"""A cache of the adjacencies of the last few graphs, shared by the layers of a model and the epochs of a training."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.graph.adjacency import Adjacency
from hf_cpu_accel.lazy.remember import Memo

MOST_GRAPHS = 16


class AdjacencyCache:
    """The adjacencies of the MOST_GRAPHS tensors used last, recognized by `Memo`.

    Writes that bypass torch (numpy, `.data`) are noticed if they change the whole tensor. Call `clear` after others.
    """

    def __init__(self) -> None:
        self._memo = Memo(MOST_GRAPHS)

    def get(self, edge_index: Tensor, flow: str, targets: int, sources: int, loops: int = -1) -> Adjacency:
        """Return the adjacency of a graph, computed at the first call.

        Args:
            edge_index: [2, E] int64 or int32.
            flow: "source_to_target" if row 1 has the targets, "target_to_source" if row 0 has them.
            targets, sources: the number of nodes on each side.
            loops: see `ops.sparse.coo_to_csr`.

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
