"""Numbers that a forward makes tensors of, and scores that it chooses instead of filling some in: in the form that is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.rewrite.recorded.forms import FILL
from hf_cpu_accel.rewrite.recorded.program import Ref, Step

_OF_A_NUMBER = (torch.tensor, torch.scalar_tensor)


def with_numbers(steps: list[Step]) -> list[Step]:
    """`steps` that fill in numbers where they did tensors of one number, and do so where they chose between a tensor and a number
    (GPT's older masks)."""
    written = {ref for step in steps if step.effect for ref in step.reads}
    numbers = {
        step.result: number
        for step in steps
        if step.result not in written and (number := _number_of(step)) is not None
    }
    new = count(1 + max((step.result.number for step in steps), default=0))
    return [made for step in steps for made in _with_number(step, numbers, new)]


def _with_number(step: Step, numbers: dict[Ref, float], new: Iterator[int]) -> Iterable[Step]:
    if step.effect or step.kwargs or len(step.args) != 3 or not isinstance(step.args[0], Ref):
        return [step]
    first, second, third = step.args
    number = numbers.get(third, third)
    if not isinstance(number, int | float):
        return [step]
    if step.function in FILL:
        return [replace(step, args=(first, second, number))]
    if step.function is not torch.where or not isinstance(second, Ref) or second in numbers:
        return [step]
    hidden = Ref(next(new))
    return [
        replace(step, function=torch.logical_not, args=(first,), result=hidden),
        replace(step, function=Tensor.masked_fill, args=(second, hidden, number)),
    ]


def _number_of(step: Step) -> float | None:
    """Of a step that makes a floating tensor of a number, or None."""
    value: Any = None
    if step.function in _OF_A_NUMBER and len(step.args) == 1:
        value = step.args[0]
    elif step.function is torch.full and step.args and tuple(step.args[0]) == ():
        value = step.kwargs.get("fill_value", (*step.args, None)[1])
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
