"""A cache of values computed from tensors, valid while the tensors are unchanged.

Models pass the same mask to each of their layers, and the same graph to each layer and epoch. Values derived from them are computed
once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

from hf_cpu_accel.guard.values import Stamp
from hf_cpu_accel.ops.derivatives import in_transform
from hf_cpu_accel.runtime.tracing import is_tracing

T = TypeVar("T")

_MOST_REMEMBERED = 256


class Memo:
    """A cache of results by their source tensors, referenced weakly: a result is dropped with its tensor.

    It has at most `most` results, the last ones used, so a result that references its own tensor does not stay forever.
    """

    def __init__(self, most: int = _MOST_REMEMBERED) -> None:
        self._most = most
        # Without a lock: each change is one atomic call, and the garbage collector may make a change during any other.
        self._entries: OrderedDict[tuple[int, Hashable], tuple[list[Stamp | None], object]] = OrderedDict()

    def get(
        self,
        tensor: Tensor,
        key: Hashable,
        make: Callable[[], T],
        *,
        also: Sequence[Tensor | None] = (),
        by_value: bool = False,
        by_sample: bool = False,
    ) -> T:
        """Return the cached result for the key and the tensors, or `make()`.

        Nothing is cached while a graph is traced, and under transforms of `torch.func`.

        Args:
            tensor: the tensor that the result depends on.
            key: the kind of result, and other values that it depends on.
            make: computes the result.
            also: other tensors that the result depends on.
            by_value, by_sample: see `Stamp`.
        """
        if is_tracing():
            return make()
        place, tensors = (id(tensor), key), (tensor, *also)
        entry = self._entries.get(place)
        if entry is not None and all(map(_holds, entry[0], tensors)):
            with suppress(KeyError):  # another thread may have removed it
                self._entries.move_to_end(place)
            return entry[1]  # type: ignore[return-value]
        if in_transform():  # its tensors end with it
            return make()
        # Stamped before `make()`: after a concurrent write the result is not found, instead of wrong.
        stamps = [
            None
            if part is None
            else Stamp(part, by_value=by_value, by_sample=by_sample, forget=self._forgetting(place))
            for part in tensors
        ]
        result = outside_inference_mode(make)
        self._entries[place] = stamps, result
        with suppress(KeyError):
            while len(self._entries) > self._most:
                self._entries.popitem(last=False)
        return result

    def clear(self) -> None:
        """Remove all results."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def _forgetting(self, place: tuple[int, Hashable]) -> Callable[[], object]:
        return lambda: self._entries.pop(place, None)


def outside_inference_mode(make: Callable[[], T]) -> T:
    """Return `make()`; autograd can record its tensors in later calls, even if this one runs under `torch.inference_mode`."""
    if not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(False), torch.no_grad():
        return make()


def _holds(stamp: Stamp | None, tensor: Tensor | None) -> bool:
    return tensor is None if stamp is None else tensor is not None and stamp.holds(tensor)


remember = Memo().get
"""The cache of values that layers derive from masks and biases."""
