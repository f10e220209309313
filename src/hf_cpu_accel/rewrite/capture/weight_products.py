"""Products with weights that no linear holds (of connections between streams, of compressed keys): by the op of this package,
unpacked."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.rewrite.capture.normal_forms import CAST
from hf_cpu_accel.rewrite.capture.program import Ref, Step
from hf_cpu_accel.rewrite.capture.tensor_reader import ParameterReader
from hf_cpu_accel.rewrite.capture.torch_products import routes
from hf_cpu_accel.rewrite.core.context import MIN_OUT_FEATURES
from hf_cpu_accel.rewrite.linear.match import FEW_WEIGHTS
from hf_cpu_accel.rewrite.linear.shared import multiply, supports_weight


def with_our_products(steps: list[Step]) -> list[Step]:
    """Return `steps` with the product of this package in place of torch's with a matrix of the layer itself, except where it
    chooses experts."""
    made = {step.result: step for step in steps}
    return [_by_ours(step, made, steps) for step in steps]


def multiply_few(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `functional.linear` for so few features or weights that no other product is faster."""
    return functional.linear(input, weight, bias)


def _by_ours(step: Step, made: dict[Ref, Step], steps: list[Step]) -> Step:
    if step.function is not functional.linear or len(step.args) < 2 or step.effect:
        return step
    weight = made.get(step.args[1])
    while weight is not None and weight.function in CAST:
        weight = made.get(weight.args[0])
    held = getattr(weight, "function", None)
    if not isinstance(held, ParameterReader) or routes(step, steps):
        return step
    if held.shape[0] < MIN_OUT_FEATURES or held.shape.numel() <= FEW_WEIGHTS:
        return replace(step, function=multiply_few)
    return replace(step, function=multiply) if supports_weight(held()) else step
