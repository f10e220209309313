"""Sibling linears in one packed weight, computed in one GEMM when they are called with the same input."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.guard.values import Stamp
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.ops.derivatives import in_transform
from hf_cpu_accel.ops.linear import MAX_SPLIT
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.packing.row_order import in_order
from hf_cpu_accel.providers.route import Route
from hf_cpu_accel.rewrite.core.grouping import GROUPING_DISABLED
from hf_cpu_accel.rewrite.linear.dispatch import LinearWork, Part, RunWork

# Limit of forwards that differ from the recorded one. After that, members that a host calls in changing
# ways are computed one by one.
_MOST_RECORDINGS = 8


class ProjectionGroup:
    """One packed weight whose output features are divided among members (query | key | value, gate | up, ...).

    A recorded forward, the first one, shows which members belong together: those that are called in a row with the same tensor,
    without writes to it in between. The result is kept as a table. From then on the first of them computes all in one GEMM, and
    the others take their slices. An input that is another tensor, that was written to, or whose writes torch does not count
    (`torch.inference_mode`) is computed separately, and so are members with hooks. If slices are left over, the host has called
    them differently: their members leave the table, and the next forward is recorded, too. Each thread has its own slices, so
    several threads may run one model.

    Attributes:
        packed: the whole weight.
        ranges: the (start, stop) output features of each member.
        biases: the bias of each member, or None.
        measured: whether other providers may serve where they were measured to be faster.
        permutation: int64 [in_features], the input features in the order of the weight, or None for their own order.
        order: int64 [out_features], the output features in the order of the weight, those of each member within its range, or
            None for their own order. Parts and routes return them in this order, `forward` in their own.
        runs: the table: {first member called: (first, last member of the run)}.
        hooks: the dictionaries of the hooks of all members.
    """

    def __init__(
        self,
        packed: PackedWeight,
        ranges: Sequence[tuple[int, int]],
        biases: Sequence[Tensor | None],
        *,
        measured: bool = False,
        permutation: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        self.packed = packed
        self.ranges = tuple(ranges)
        self.biases = tuple(biases)
        self.measured = measured
        self.permutation = permutation
        self.order = order
        self.runs: dict[int, tuple[int, int]] = {}
        self.hooks: list[dict[int, Any]] = []
        self._calls = threading.local()
        self._recording_from: int | None = None  # the member with which a forward begins, where that is known
        self._reset()

    def forward(self, index: int, input: Tensor) -> Tensor:
        """Compute member `index` of `input` [..., in_features] -> [..., out_features of the member]."""
        if (
            len(self.ranges) == 1
            or torch.compiler.is_compiling()
            or GROUPING_DISABLED.get()
            or input.is_inference()
            or any(self.hooks)
        ):
            return self._compute(index, input)
        if isinstance(input, LazyTensor):  # whose views share no version with it
            input = input.tensor
        calls = self._calls
        if self._recording and not in_transform():
            self._record(index, input)
        joined: _Joined | None = getattr(calls, "joined", None)
        if joined is not None:
            output = joined.take(index, input)
            if output is not None:
                if not joined.outputs:
                    calls.joined = None
                return output
            if index == joined.leader or index in joined.outputs:
                calls.joined = None
                self._shrink(joined)
        first, last = self.runs.get(index, (index, index))
        if first == last:
            return self._compute(index, input)
        slices = self.route(first, last)(input)
        own = {member: self._own(member, slices[member - first]) for member in range(first, last + 1)}
        output = own.pop(index)
        calls.joined = _Joined(index, input, own)
        return output

    def reordered(self, order: Tensor) -> ProjectionGroup:
        """Return the same members over a copy of the weight with its output features in this order, for members without biases."""
        assert self.order is None
        assert all(bias is None for bias in self.biases)
        group = ProjectionGroup(
            in_order(self.packed, order),
            self.ranges,
            self.biases,
            measured=self.measured,
            permutation=self.permutation,
            order=order,
        )
        group.runs, group.hooks = dict(self.runs), self.hooks
        return group

    def in_own_order(self, index: int | None = None) -> PackedWeight:
        """Return the weight of a member, or of all, with its output features in their own order."""
        if self.order is None:
            return self.packed if index is None else self.part(index, index).packed
        if index is None:
            return in_order(self.packed, self.order.argsort())
        places = self.places(index)
        assert places is not None
        return in_order(self.part(index, index).packed, places)

    def places(self, index: int) -> Tensor | None:
        """Return int64 [features of the member], the place of each in the product, or None if all are in order."""
        start, stop = self.ranges[index]
        return None if self.order is None else (self.order[start:stop] - start).argsort()

    def weight(self, first: int, last: int) -> tuple[PackedWeight, Tensor | None]:
        """Return the packed weight and the bias of the members `first` to `last`, both included."""
        part = self.part(first, last)
        return part.packed, part.bias

    def part(self, first: int, last: int) -> Part:
        """Return the members `first` to `last` for a `Work`."""
        part = self._parts.get((first, last))
        if part is None:
            start, stop = self.ranges[first][0], self.ranges[last][1]
            whole = stop - start == self.packed.out_features
            packed = self.packed if whole else self.packed.narrow(start, stop - start)
            part = self._parts[first, last] = Part(packed, self._bias(first, last), self.permutation)
        return part

    def route(self, first: int, last: int) -> Route:
        """Return the route that computes the members `first` to `last`: a tensor for one, else a list of them."""
        route = self._routes.get((first, last))
        if route is None:
            work: LinearWork | RunWork = LinearWork(self.part(first, last))
            if first != last:
                members = [self.part(index, index) for index in range(first, last + 1)]
                work = RunWork(self.part(first, last), members)
            route = self._routes[first, last] = Route(work, measured=self.measured)
        return route

    def fused_route(self, index: int, activation: str, *, residual: bool) -> Route:
        """Return the route that computes one member with the ops that follow it."""
        route = self._fused_routes.get((index, activation, residual))
        if route is None:
            work = LinearWork(self.part(index, index), activation, residual=residual)
            route = self._fused_routes[index, activation, residual] = Route(work, measured=self.measured)
        return route

    def routes(self, index: int) -> list[Route]:
        """Return the routes in use for a member."""
        runs = [route for (first, last), route in self._routes.items() if first <= index <= last]
        return runs + [route for (member, _, _), route in self._fused_routes.items() if member == index]

    def take_bias(self, index: int, bias: Tensor | None) -> None:
        """Replace the bias of a member. Call it after a bias was cast, moved or replaced."""
        self.biases = (*self.biases[:index], bias, *self.biases[index + 1 :])
        for (first, last), part in self._parts.items():
            part.bias = self._bias(first, last)

    def _compute(self, index: int, input: Tensor) -> Tensor:
        route = self._routes[index, index]
        # Measuring single members is pointless before the joint ones are known.
        output = route.work.own(input) if self._recording and len(self.ranges) > 1 else route(input)
        return self._own(index, output)

    def _own(self, index: int, output: Tensor) -> Tensor:
        places = self._places[index]
        return output if places is None else output.index_select(-1, places)

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

    def _record(self, index: int, input: Tensor) -> None:
        record: _Record | None = getattr(self._calls, "record", None)
        if record is None and self._recording_from not in (None, index):
            return  # in the middle of a forward
        if record is None or index not in record.members:
            self._calls.record = record = record or _Record()
            record.add(index, input)
            return
        # The next forward: the one before is complete.
        self._calls.record, self._recording = None, False
        self.runs = {**self.runs, **record.runs()}

    def _shrink(self, joined: _Joined) -> None:
        """Remove the members that did not take their slices from the run."""
        first, last = self.runs.get(joined.leader, (joined.leader, joined.leader))
        claimed = [member for member in range(first, last + 1) if member not in joined.outputs]
        while claimed and claimed[-1] - claimed[0] + 1 != len(claimed):
            claimed.remove(max(claimed, key=lambda member: abs(member - joined.leader)))
        self.runs = {**self.runs, joined.leader: (claimed[0], claimed[-1])}
        if self._recordings_left > 0:
            self._recordings_left -= 1
            self._recording, self._recording_from = True, joined.leader

    def _reset(self) -> None:
        self._recording, self._recording_from = not self.runs, None
        self._recordings_left = _MOST_RECORDINGS
        self._calls = threading.local()
        self._parts: dict[tuple[int, int], Part] = {}
        self._routes: dict[tuple[int, int], Route] = {}
        self._fused_routes: dict[tuple[int, str, bool], Route] = {}
        self._places = [self.places(index) for index in range(len(self.ranges))]
        for index in range(len(self.ranges)):
            self.route(index, index)  # now, so that nothing is created while a graph is traced

    def __getstate__(self) -> dict[str, Any]:
        names = ("packed", "ranges", "biases", "measured", "permutation", "order", "runs", "hooks")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


class _Joined:
    """The slices that the leader of a run computed for the others."""

    def __init__(self, leader: int, input: Tensor, outputs: dict[int, Tensor]) -> None:
        self.leader = leader
        self.outputs = outputs
        self._input = input  # alive as long as it has to be recognized
        self._version = input._version

    def take(self, index: int, input: Tensor) -> Tensor | None:
        """Return the slice of a member, or None if it has none for this input in its current state."""
        if input is self._input and input._version == self._version:
            return self.outputs.pop(index, None)
        return None


class _Record:
    """The members that one forward called, in this order."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self._shared: set[int] = set()  # places of those that had the input of the one before
        self._input: Stamp | None = None

    def add(self, index: int, input: Tensor) -> None:
        if self._input is not None and self._input.holds(input):
            self._shared.add(len(self.members))
        self.members.append(index)
        self._input = Stamp(input)

    def runs(self) -> dict[int, tuple[int, int]]:
        """Return {first called: (first, last)} of adjacent members that had one input."""
        found: dict[int, tuple[int, int]] = {}
        start = 0
        for stop in range(1, len(self.members) + 1):
            if stop in self._shared:
                continue
            run = self.members[start:stop]
            if 1 < len(run) == max(run) - min(run) + 1 <= MAX_SPLIT:
                found[run[0]] = (min(run), max(run))
            start = stop
        return found
