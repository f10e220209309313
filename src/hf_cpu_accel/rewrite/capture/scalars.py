"""Normalize numbers that a forward turns into tensors, and selections between scores and a number, to the known form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from hf_cpu_accel.rewrite.capture.normal_forms import FILL, is_of_scores
from hf_cpu_accel.rewrite.capture.program import Ref, Step


def with_numbers(steps: list[Step]) -> list[Step]:
    """Return `steps` that fill in numbers instead of tensors of one number, also in place of selections between scores and a
    number (older masks of GPT)."""
    made = {step.result: step for step in steps}
    written = {ref for step in steps if step.effect for ref in step.reads}
    numbers = {
        step.result: number
        for step in steps
        if step.result not in written and (number := _number_of(step)) is not None
    }
    new = count(1 + max((step.result.number for step in steps), default=0))
    return [each for step in steps for each in _with_number(step, numbers, made, new)]


def _with_number(
    step: Step, numbers: dict[Ref, float], made: dict[Ref, Step], new: Iterator[int]
) -> Iterable[Step]:
    if step.effect or step.kwargs or len(step.args) != 3 or not isinstance(step.args[0], Ref):
        return [step]
    first, second, third = step.args
    number = numbers.get(third, third)
    if not isinstance(number, int | float):
        return [step]
    if step.function in FILL:
        return [replace(step, args=(first, second, number))]
    # Scores are floating, so that no number makes them of another dtype.
    if step.function is not torch.where or not isinstance(second, Ref) or not is_of_scores(second, made):
        return [step]
    hidden = Ref(next(new))
    return [
        replace(step, function=torch.logical_not, args=(first,), result=hidden),
        replace(step, function=Tensor.masked_fill, args=(second, hidden, number)),
    ]


def _number_of(step: Step) -> float | None:
    """Return the number of a step that creates a tensor of one number, or None."""
    if step.reads or step.function not in (torch.tensor, torch.scalar_tensor, torch.full):
        return None
    made: Tensor = step.function(*step.args, **step.kwargs)
    return float(made) if made.dim() == 0 and made.is_floating_point() else None
