"""Remembers the adjacency of the last few graphs, so that the layers of a model and the epochs of a training share it."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.graph.adjacency import Adjacency

MOST_GRAPHS = 16
Key = tuple[Any, ...]


class AdjacencyCache:
    """Adjacencies by the tensor that they were made of.

    A tensor is known again if it is the same object, on the same memory, and not written to since (its version counts in-place
    operations). It is held weakly: with it goes what was made of it. At most MOST_GRAPHS adjacencies are kept, the last ones used.
    Writes that go past torch (numpy, `.data`) do not count as one: `clear` is for those.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, tuple[weakref.ref[Tensor], Adjacency]] = OrderedDict()

    def get(self, edge_index: Tensor, flow: str, targets: int, sources: int, loops: int = -1) -> Adjacency:
        """The adjacency of edge_index [2, E], of which row 1 are the targets if `flow` is "source_to_target", and row 0 otherwise.

        Raises:
            RuntimeError: an index is negative or out of range.
        """
        target, source = (1, 0) if flow == "source_to_target" else (0, 1)
        if torch.compiler.is_compiling() or edge_index.is_inference():  # no identity, or no version
            return Adjacency(edge_index[target], edge_index[source], targets, sources, loops)
        layout = edge_index.data_ptr(), edge_index._version, edge_index.shape[1], edge_index.stride()
        key = (id(edge_index), *layout, flow, targets, sources, loops)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry[0]() is edge_index:
                self._entries.move_to_end(key)
                return entry[1]
        plain = edge_index.as_subclass(Tensor)
        adjacency = Adjacency(plain[target], plain[source], targets, sources, loops)
        with self._lock:
            forget = weakref.ref(edge_index, lambda _: self._forget(key))
            self._entries[key] = forget, adjacency
            while len(self._entries) > MOST_GRAPHS:
                self._entries.popitem(last=False)
        return adjacency

    def clear(self) -> None:
        """Forget all graphs."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def _forget(self, key: Key) -> None:
        # Not under the lock: a collection may run this in the thread that holds it. Taking a key out of a dict is atomic.
        self._entries.pop(key, None)


adjacencies = AdjacencyCache()
"""The graphs of this process."""
