"""The choice between a fused layer on this package's kernels and its linear layers by other providers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from hf_cpu_accel.providers.autotune import NATIVE
from hf_cpu_accel.providers.choice import FEWEST_ROWS
from hf_cpu_accel.providers.route import Route
from hf_cpu_accel.runtime.tracing import is_tracing


class GroupedLinear(Protocol):
    """The part of a packed linear that this file uses.

    Attributes:
        group: the packed weight that it shares with its siblings, with the routes `group.route(first, last)`.
        index: its index in the group.
    """

    group: Any
    index: int

    @property
    def weight_dtype(self) -> torch.dtype: ...


# The linears must be this much faster by their best providers to give up the fusion of a layer, which saves the calls of a dozen
# modules and the tensors between them.
_FUSION_GAIN = 0.10

_memo: weakref.WeakKeyDictionary[GroupedLinear, dict[tuple[int, int, int], bool]] = (
    weakref.WeakKeyDictionary()
)


def native_everywhere(linears: Sequence[GroupedLinear], rows: int) -> bool:
    """Return whether a layer of these linears is fastest on this package's kernels alone.

    Measures at the first use; until all is measured it returns True.

    Args:
        linears: all linears of one layer, in the order of their calls; no other sequence of the same length may start with the same
            one. Consecutive members of one projection group count as one product.
        rows: the rows of the input (batch x tokens).
    """
    first = linears[0]
    if not first.group.measured or is_tracing() or rows < FEWEST_ROWS:
        return True
    cached = _memo.get(first)
    if cached is None:
        cached = _memo[first] = {}
    key = ((rows - 1).bit_length(), torch.get_num_threads(), len(linears))
    native_wins = cached.get(key)
    if native_wins is None:
        choices = [route.choice(rows, first.weight_dtype) for route in _routes(linears)]
        decided = [choice for choice in choices if choice is not None]
        if len(decided) < len(choices):
            return True
        native = sum(choice.seconds.get(NATIVE, 0.0) for choice in decided)
        best = sum(choice.seconds.get(choice.provider, 0.0) for choice in decided)
        native_wins = cached[key] = best >= (1 - _FUSION_GAIN) * native
    return native_wins


def _routes(linears: Sequence[GroupedLinear]) -> Iterator[Route]:
    start = 0
    while start < len(linears):
        group, stop = linears[start].group, start + 1
        while stop < len(linears) and linears[stop].group is group:
            stop += 1
        indices = sorted(linear.index for linear in linears[start:stop])
        if indices == list(range(indices[0], indices[-1] + 1)):
            yield group.route(indices[0], indices[-1])
        else:
            yield from (group.route(index, index) for index in indices)
        start = stop
