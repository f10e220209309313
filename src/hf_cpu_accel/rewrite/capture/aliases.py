"""Find tensors of a call that share memory, and those that may: `contiguous` returns a copy or not, depending on strides.

Recorded steps may compute other strides than the forward, so either case can occur in either of them. A write to one tensor is
then visible in the other or not. If both are used, the steps cannot replace the forward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from hf_cpu_accel.rewrite.capture.program import Ref, Step


class Aliases:
    """Views and writes of a call; numbers are those of the next step at that time."""

    def __init__(self) -> None:
        self._links: list[tuple[int, Ref, Ref, bool]] = []
        self._writes: list[tuple[int, set[Ref]]] = []

    def view(self, number: int, source: Ref, result: Ref, *, may_copy: bool) -> None:
        """Record that `result` shares the memory of `source`, or may."""
        if source != result:
            self._links.append((number, source, result, may_copy))

    def written(self, number: int, refs: Iterable[Ref]) -> None:
        self._writes.append((number, set(refs)))

    def are_ambiguous(self, steps: Sequence[Step], kept: set[Ref]) -> bool:
        """Return whether a tensor is read after a write that may have changed it, or not.

        Args:
            kept: the tensors that are read after the last step.
        """
        for number, refs in self._writes:
            surely, perhaps = (self._together(refs, number, may_copy=may_copy) for may_copy in (False, True))
            read = {ref for step in steps[number:] for ref in step.reads} | kept
            if not read.isdisjoint(perhaps - surely):
                return True
        return False

    def together_with(self, refs: Iterable[Ref]) -> set[Ref]:
        """Return all refs that may share memory with `refs` at some time."""
        return self._together(set(refs), sys.maxsize, may_copy=True)

    def _together(self, refs: set[Ref], number: int, *, may_copy: bool) -> set[Ref]:
        """Return all refs that share memory with `refs` before step `number`, or, if `may_copy`, may."""
        links = [
            (one, other)
            for made, one, other, maybe in self._links
            if made <= number and (may_copy or not maybe)
        ]
        found, size = set(refs), 0
        while len(found) > size:
            size = len(found)
            for one, other in links:
                if one in found or other in found:
                    found |= {one, other}
        return found
