"""Sibling linears in one packed weight, computed in one GEMM where they are called with the same input."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.linear import MAX_SPLIT
from hf_cpu_accel.packing import PackedWeight
from hf_cpu_accel.providers.route import Route, deciding_nothing
from hf_cpu_accel.rewrite.served import LinearWork, Part, RunWork

# Calls that may start a new run, after which a group has seen enough of its model and stops taking notes.
_LESSONS_PER_MEMBER = 4


_separately: ContextVar[bool] = ContextVar("separately", default=False)


@contextmanager
def members_apart() -> Iterator[None]:
    """Compute every member on its own, by our kernels, and learn nothing: for looking at what a model does."""
    token = _separately.set(True)
    try:
        with deciding_nothing():
            yield
    finally:
        _separately.reset(token)


class ProjectionGroup:
    """One packed weight whose output features are divided among members (query | key | value, gate | up, ...).

    Which members belong together is not told by their names but learned: the first forward computes them one by one
    and notes which ones are called in a row with the very same input tensor. From then on the first of them computes
    all in one GEMM, and the others take their slices, provided that their input *is* that tensor, unchanged; any other
    input (cross-attention) is computed on its own. A slice that nobody came for is not computed again. Each thread
    has its own slices, so several threads may run one model.

    Attributes:
        packed: the whole weight.
        ranges: the (start, stop) output features of each member.
        biases: the bias of each member, or None.
        measured: whether other providers may serve where they were measured to be faster.
        runs: what was learned: {first member called: (first, last member of the run)}.
    """

    def __init__(
        self,
        packed: PackedWeight,
        ranges: Sequence[tuple[int, int]],
        biases: Sequence[Tensor | None],
        *,
        measured: bool = False,
    ) -> None:
        self.packed = packed
        self.ranges = tuple(ranges)
        self.biases = tuple(biases)
        self.measured = measured
        self.runs: dict[int, tuple[int, int]] = {}
        self._reset()

    def forward(self, index: int, input: Tensor) -> Tensor:
        """Member `index` of `input` [..., in_features] -> [..., out_features of the member]."""
        if len(self.ranges) == 1 or torch.compiler.is_compiling() or _separately.get():
            return self._compute(index, input)
        calls = self._calls
        stash: _Stash | None = getattr(calls, "stash", None)
        if stash is not None:
            output = stash.take(index, input)
            if output is not None:
                if not stash.outputs:
                    calls.stash = None
                return output
        if self._lessons:
            self._learn(index, input)
        first, last = self.runs.get(index, (index, index))
        if stash is not None and stash.leader == index:
            calls.stash = None
            first, last = self._shrink(index, stash.outputs)
        if first == last:
            return self._compute(index, input)
        return self._compute_run(index, first, last, input)

    def weight(self, first: int, last: int) -> tuple[PackedWeight, Tensor | None]:
        """The packed weight and the bias of the members `first` to `last`, both included."""
        part = self.part(first, last)
        return part.packed, part.bias

    def part(self, first: int, last: int) -> Part:
        """The same, for a `Work`."""
        part = self._parts.get((first, last))
        if part is None:
            start, stop = self.ranges[first][0], self.ranges[last][1]
            whole = stop - start == self.packed.out_features
            packed = self.packed if whole else self.packed.narrow(start, stop - start)
            part = self._parts[first, last] = Part(packed, self._bias(first, last))
        return part

    def route(self, first: int, last: int) -> Route:
        """Computes the members `first` to `last`: a tensor if that is one, else a list of them."""
        route = self._routes.get((first, last))
        if route is None:
            work: LinearWork | RunWork = LinearWork(self.part(first, last))
            if first != last:
                members = [self.part(index, index) for index in range(first, last + 1)]
                work = RunWork(self.part(first, last), members)
            route = self._routes[first, last] = Route(work, measured=self.measured)
        return route

    def fused_route(self, index: int, activation: str, *, residual: bool) -> Route:
        """Computes one member with what follows it."""
        route = self._fused_routes.get((index, activation, residual))
        if route is None:
            work = LinearWork(self.part(index, index), activation, residual=residual)
            route = self._fused_routes[index, activation, residual] = Route(work, measured=self.measured)
        return route

    def routes(self, index: int) -> list[Route]:
        """Those in use for a member."""
        runs = [route for (first, last), route in self._routes.items() if first <= index <= last]
        return runs + [route for (member, _, _), route in self._fused_routes.items() if member == index]

    def forget_biases(self) -> None:
        """To be called when the biases were cast or moved."""
        for (first, last), part in self._parts.items():
            part.bias = self._bias(first, last)

    def _compute(self, index: int, input: Tensor) -> Tensor:
        route = self._routes[index, index]
        # Before it is known what is computed together, it is not worth measuring what each takes alone.
        return route.work.own(input) if self._lessons and len(self.ranges) > 1 else route(input)

    def _compute_run(self, index: int, first: int, last: int, input: Tensor) -> Tensor:
        slices = self.route(first, last)(input)
        outputs = {member: slices[member - first] for member in range(first, last + 1) if member != index}
        self._calls.stash = _Stash(index, input, outputs)
        return slices[index - first]

    def _bias(self, first: int, last: int) -> Tensor | None:
        biases = self.biases[first : last + 1]
        if first == last or all(bias is None for bias in biases):
            return biases[0]
        dtype = next(bias.dtype for bias in biases if bias is not None)
        parts = [
            torch.zeros(stop - start, dtype=dtype) if bias is None else bias.detach()
            for bias, (start, stop) in zip(biases, self.ranges[first : last + 1], strict=True)
        ]
        return torch.cat(parts)

    def _learn(self, index: int, input: Tensor) -> None:
        trace: _Trace | None = getattr(self._calls, "trace", None)
        if trace is not None and trace.continues(index, input):
            trace.members.append(index)
            return
        if trace is not None and trace.members[0] not in self.runs:
            first, last = min(trace.members), max(trace.members)
            if 1 < len(trace.members) == last - first + 1 <= MAX_SPLIT:
                self.runs[trace.members[0]] = (first, last)
        self._lessons -= 1
        self._calls.trace = None if index in self.runs or not self._lessons else _Trace(index, input)

    def _shrink(self, leader: int, unclaimed: dict[int, Tensor]) -> tuple[int, int]:
        """Take the members that nobody came for out of the run of `leader`, for good."""
        first, last = self.runs[leader]
        claimed = [member for member in range(first, last + 1) if member not in unclaimed]
        while claimed and claimed[-1] - claimed[0] + 1 != len(claimed):
            claimed.remove(max(claimed, key=lambda member: abs(member - leader)))
        self.runs[leader] = (claimed[0], claimed[-1])
        return self.runs[leader]

    def _reset(self) -> None:
        self._lessons = _LESSONS_PER_MEMBER * len(self.ranges)
        self._calls = threading.local()
        self._parts: dict[tuple[int, int], Part] = {}
        self._routes: dict[tuple[int, int], Route] = {}
        self._fused_routes: dict[tuple[int, str, bool], Route] = {}
        for index in range(len(self.ranges)):
            self.route(index, index)  # now, so that nothing is made while a graph is traced

    def __getstate__(self) -> dict[str, Any]:
        names = ("packed", "ranges", "biases", "measured", "runs")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


class _Input:
    """Remembers a tensor without keeping it alive, and notices if it was written to.

    Tensors made under `torch.inference_mode` count no versions, so their sum stands in for it.
    """

    def __init__(self, tensor: Tensor, *, checksum: bool) -> None:
        self.reference = weakref.ref(tensor)
        self.checksum = checksum
        self.stamp = self._stamp(tensor)

    def matches(self, tensor: Tensor) -> bool:
        return self.reference() is tensor and self._stamp(tensor) == self.stamp

    def _stamp(self, tensor: Tensor) -> float | None:
        if not tensor.is_inference():
            return tensor._version
        return tensor.sum(dtype=torch.float64).item() if self.checksum else None


class _Trace:
    """The members called in a row with one input, while learning."""

    def __init__(self, index: int, input: Tensor) -> None:
        self.input = _Input(input, checksum=True)
        self.members = [index]

    def continues(self, index: int, input: Tensor) -> bool:
        return index not in self.members and self.input.matches(input)


class _Stash:
    """The slices that the leader of a run computed for the others."""

    def __init__(self, leader: int, input: Tensor, outputs: dict[int, Tensor]) -> None:
        self.leader = leader
        self.input = _Input(input, checksum=False)
        self.outputs = outputs

    def take(self, index: int, input: Tensor) -> Tensor | None:
        if index in self.outputs and self.input.matches(input):
            return self.outputs.pop(index)
        return None
