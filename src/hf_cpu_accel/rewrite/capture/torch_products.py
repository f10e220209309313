"""Find the products of a layer's steps that torch computes."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.rewrite.attention.deformable import FusedDeformableAttention
from hf_cpu_accel.rewrite.capture.normal_forms import CAST, PRODUCT, VIEW
from hf_cpu_accel.rewrite.capture.program import Ref, Step
from hf_cpu_accel.rewrite.core.trace import SOFTMAX

_PRODUCTS = (
    *(functional.linear, torch.addmm, torch.softmax, functional.softmax, Tensor.softmax),
    *(functional.scaled_dot_product_attention, functional.grid_sample),
)
_WEIGHED = frozenset((*PRODUCT, torch.einsum))
_CHOICES = (torch.topk, Tensor.topk, torch.argmax, Tensor.argmax)


def torch_products(steps: Sequence[Step], inputs: int) -> list[str]:
    """Return the names of the products with weights, and of attention, that torch computes in the steps.

    Products that torch computes in fused layers, too, do not count: those of routers, which choose experts. Results of weights
    alone (tables of positions) are as small, and so is the softmax over the few points of a query in deformable attention.

    Args:
        inputs: the number of inputs.
    """
    of_inputs = {Ref(number) for number in range(inputs)}
    for step in steps:
        if not of_inputs.isdisjoint(step.reads):
            of_inputs.add(step.result)
    found = [step for step in steps if step.result in of_inputs and step.function in _PRODUCTS]
    ours = [step for step in found if routes(step, steps) or _weighs_points(step, steps)]
    return sorted({step.function.__name__ for step in found if step not in ours})


def routes(step: Step, steps: Sequence[Step]) -> bool:
    """Return whether a step computes scores of experts: they choose some, and no product follows except in modules of this
    package."""
    of_scores = {step.result}
    chooses = step.function in SOFTMAX and _is_of_chosen(step, steps)
    for other in steps:
        if other is step or other.leaf is not None or of_scores.isdisjoint(other.reads):
            continue
        if other.function in _WEIGHED:
            return False
        chooses |= other.function in _CHOICES
        of_scores.add(other.result)
    return chooses


def _is_of_chosen(step: Step, steps: Sequence[Step]) -> bool:
    """Return whether the input of a step was selected from other values."""
    made = {other.result: other for other in steps}
    source = made.get(step.args[0])
    while source is not None and (source.function is operator.getitem or source.function in CAST):
        source = made.get(source.args[0])
    return source is not None and source.function in _CHOICES


def _weighs_points(step: Step, steps: Sequence[Step]) -> bool:
    """Return whether a step is a softmax that only deformable attention of this package reads."""
    if step.function not in SOFTMAX:
        return False
    weights, readers = {step.result}, []
    for other in steps:
        if not weights.isdisjoint(other.reads):
            if other.function in VIEW:
                weights.add(other.result)
            else:
                readers.append(other.leaf)
    return bool(readers) and all(isinstance(leaf, FusedDeformableAttention) for leaf in readers)
