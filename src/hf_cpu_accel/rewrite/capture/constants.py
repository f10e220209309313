"""Steps that depend on weights and numbers alone (window biases, tables of positions) run once, not in each call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import getitem
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.guard.values import Fingerprint
from hf_cpu_accel.rewrite.capture.aliases import Aliases
from hf_cpu_accel.rewrite.capture.normal_forms import VIEWS
from hf_cpu_accel.rewrite.capture.program import Program, Ref, Step, expect, refs_in
from hf_cpu_accel.rewrite.capture.simplify import Steps
from hf_cpu_accel.rewrite.capture.tensor_reader import ParameterReader, tensors_in

# Limits of weights, whose values are compared in each call, and of kept results.
_MOST_VALUES, _MOST_BYTES = 1 << 16, 4 << 20


class Constants:
    """A function without arguments that returns `results` of `steps`.

    Args:
        steps: from weights to results, in their order.
    """

    __name__ = "constants"

    def __init__(self, steps: Sequence[Step], results: tuple[Ref, ...]) -> None:
        self._held = [step.function for step in steps if isinstance(step.function, ParameterReader)]
        self._program = Program(0, steps, results)
        self._kept = self._computed([held() for held in self._held])

    def __call__(self) -> tuple[Any, ...]:
        """Return the results, computed again if a weight has changed.

        Raises:
            Mismatch: a weight is another kind of tensor, or its values take another branch than the steps.
        """
        tensors = [held() for held in self._held]
        weights, results = self._kept
        if not weights.matches(tensors):
            self._kept = _, results = self._computed(tensors)
        return results

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_in(self._kept[1]))

    def _computed(self, tensors: list[Tensor]) -> tuple[Fingerprint, tuple[Any, ...]]:
        weights = Fingerprint(tensors, most=_MOST_VALUES)  # before: the next call detects a concurrent write
        with torch.inference_mode(mode=False), torch.no_grad():
            return weights, self._program(())


def with_constants(steps: Steps, aliases: Aliases) -> Steps:
    """Return `steps` with one `Constants` in place of those that depend on weights and numbers alone, if they compute anything.

    Args:
        aliases: of the recorded call: tensors that are written later, or returned, are computed in each call.
    """
    constant = _Constant(steps, aliases)
    results = tuple(dict.fromkeys(constant.read_outside()))
    needed = constant.needed_for(results)
    held = [step.function for step in needed if isinstance(step.function, ParameterReader)]
    if not results or sum(one.shape.numel() for one in held) > _MOST_VALUES:
        return steps
    constants = Constants(needed, results)
    if constants.nbytes > _MOST_BYTES:
        return steps
    whole = Ref(1 + max(step.result.number for step in steps.steps))
    given = [Step(getitem, (whole, number), {}, result) for number, result in enumerate(results)]
    rest = [step for step in steps.steps if not constant.is_inside(step)]
    return Steps([Step(constants, (), {}, whole), *given, *rest], steps.output).without_unread()


class _Constant:
    """The steps that depend on weights and numbers alone."""

    def __init__(self, steps: Steps, aliases: Aliases) -> None:
        self._steps = steps
        self._made = {step.result: step for step in steps.steps}
        self.results: set[Ref] = set()  # of weights, and what follows from them
        self._plain: set[Ref] = set()  # weights, and views of them
        changing: set[Ref] = set()
        while True:
            self._find(changing)
            exposed = aliases.together_with(self.results - self._plain) & self._exposed()
            if not exposed:
                return
            changing |= aliases.together_with(exposed)

    def is_inside(self, step: Step) -> bool:
        """Return whether no step outside needs the result: it depends on weights alone, and is no weight."""
        return step.result in self.results - self._plain

    def read_outside(self) -> Iterator[Ref]:
        """Yield the results that other steps read."""
        for step in self._steps.steps:
            if step.result not in self.results:
                yield from (ref for ref in step.reads if ref in self.results - self._plain)

    def needed_for(self, results: Sequence[Ref]) -> list[Step]:
        """Return the steps that compute `results`, with all steps that write to them or check them."""
        needed: set[Ref] = set()
        waiting = [
            *results,
            *(step.result for step in self._steps.steps if step.effect and step.result in self.results),
        ]
        while waiting:
            ref = waiting.pop()
            if ref not in needed:
                needed.add(ref)
                waiting += self._made[ref].reads
        return [step for step in self._steps.steps if step.result in needed]

    def _find(self, changing: set[Ref]) -> None:
        self.results, self._plain = set(), set()
        for step in self._steps.steps:
            if step.leaf is not None or step.result in changing or not self.results.issuperset(step.reads):
                continue
            self.results.add(step.result)
            if isinstance(step.function, ParameterReader) or (
                step.function in VIEWS and self._plain.issuperset(step.reads)
            ):
                self._plain.add(step.result)

    def _exposed(self) -> set[Ref]:
        """Return the results that are returned, or that other steps may write to."""
        writing = (s for s in self._steps.steps if s.effect and s.leaf is None and s.function is not expect)
        written = (step.reads for step in writing if step.result not in self.results)
        return {*refs_in(self._steps.output), *chain.from_iterable(written)}
