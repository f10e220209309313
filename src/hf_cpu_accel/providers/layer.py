"""A fused layer calls our kernels by themselves. Is that right for so many rows, or would another provider's linears win?"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from hf_cpu_accel.providers.autotune import NATIVE
from hf_cpu_accel.providers.choice import FEWEST_ROWS
from hf_cpu_accel.providers.route import Route


class GroupedLinear(Protocol):
    """A packed linear, as far as it matters here.

    Attributes:
        group: the packed weight that it shares with its siblings, whose routes are `group.route(first, last)`.
        index: which member of the group it is.
    """

    group: Any
    index: int

    @property
    def weight_dtype(self) -> torch.dtype: ...


# The linears together must be this much faster by their best providers before a layer gives up its fusion: unfused, it pays for the
# calls of a dozen modules, and for tensors between them that a fused layer does not have.
_FUSION_GAIN = 0.10

_memo: weakref.WeakKeyDictionary[GroupedLinear, dict[tuple[int, int, int], bool]] = (
    weakref.WeakKeyDictionary()
)


def native_everywhere(linears: Sequence[GroupedLinear], rows: int) -> bool:
    """Whether a layer of these linears is best served by our kernels alone.

    Measures at first use, as every choice does; until all is measured the answer is yes.

    Args:
        linears: all of one layer, in the order in which they are called; no other sequence of the same length may begin with the
            same one. Members of one projection group that follow one another count as one product.
        rows: rows of the input (batch x tokens).
    """
    first = linears[0]
    if (
        not first.group.measured
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or rows < FEWEST_ROWS
    ):
        return True
    known = _memo.get(first)
    if known is None:
        known = _memo[first] = {}
    key = ((rows - 1).bit_length(), torch.get_num_threads(), len(linears))
    answer = known.get(key)
    if answer is None:
        choices = [route.choice(rows, first.weight_dtype) for route in _routes(linears)]
        made = [choice for choice in choices if choice is not None]
        if len(made) < len(choices):
            return True
        ours = sum(choice.seconds.get(NATIVE, 0.0) for choice in made)
        best = sum(choice.seconds.get(choice.provider, 0.0) for choice in made)
        answer = known[key] = best >= (1 - _FUSION_GAIN) * ours
    return answer


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
