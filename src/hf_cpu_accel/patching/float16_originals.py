"""Original weights of float16 models, which are float32 during the rewrite: they are stored as float16."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.patching.originals import OriginalsStore, Ticket

_COMPARED = 1 << 22  # values at once


class HalvingStore:
    """A store that keeps float32 values that float16 can hold as float16, in half the space.

    `halves`: the weights that are mapped from a file, by the addresses of their float32 values.
    """

    def __init__(self, store: OriginalsStore, halves: dict[int, Tensor]) -> None:
        self._store = store
        self._halves = halves

    def put(self, tensor: Tensor) -> Ticket:
        if tensor.dtype is not torch.float32:
            return self._store.put(tensor)
        half = self._halves.get(tensor.data_ptr())
        if half is None or half.shape != tensor.shape:
            half = tensor.to(torch.float16)
        return self._store.put(half if _is_exact(half, tensor) else tensor)

    def get(self, ticket: Ticket) -> Tensor:
        return self._store.get(ticket)

    def give_back(self, tensor: Tensor) -> object:
        return self._store.give_back(tensor)

    def check(self) -> None:
        self._store.check()

    def commit(self) -> None:
        self._halves.clear()
        self._store.commit()


def _is_exact(half: Tensor, tensor: Tensor) -> bool:
    """Return whether `half` has the values of `tensor`, compared in pieces."""
    pieces = zip(half.flatten().split(_COMPARED), tensor.flatten().split(_COMPARED), strict=True)
    return all(torch.equal(some.to(tensor.dtype), values) for some, values in pieces)
