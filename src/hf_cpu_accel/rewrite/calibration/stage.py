"""The stage that rounds four-bit weights for the examples of the user, one linear after another."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hf_cpu_accel.lazy.remember import Stamp
from hf_cpu_accel.ops.linear import linear as packed_linear
from hf_cpu_accel.packing.four_bits import nearest_form
from hf_cpu_accel.packing.linear import PackedWeight, pack_linear, unpack_linear
from hf_cpu_accel.packing.second_order import DAMPING, InputMoments, pack_rounded
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.calibration.walk import Compute, walk
from hf_cpu_accel.rewrite.core.calibration import Example, call, fitting
from hf_cpu_accel.rewrite.core.context import Context, linear_refusal
from hf_cpu_accel.rewrite.linear.transposed import as_linear
from hf_cpu_accel.tolerance import PACKED

# How much of what the rules allow a weight may be off for inputs that are like no example, as root mean square.
_FAR = 0.6
_DAMPINGS = (DAMPING, 10 * DAMPING, 100 * DAMPING)


def calibrate(context: Context) -> Iterable[PlanItem]:
    """Round what is to be packed in four bits so that the outputs for `context.calibration` change least.

    Each linear is rounded for what the layers ahead of it give when they are rounded already.

    Raises:
        ValueError: an example that the model does not take, or no linear that it reaches.
    """
    if not context.calibration or context.static:
        return ()
    examples = [fitting(example, context.float16 is not None) for example in context.calibration]
    linears = {
        module: linear for path, module in context.modules if (linear := _target(path, module, context))
    }
    with tqdm(total=len(linears), desc="Calibrating", unit="linear", disable=None) as progress:
        rounding = _Rounding(context, examples, linears, progress)
        walk([partial(call, *pair, context.root) for pair in enumerate(examples)], list(linears), rounding)
    context.notes += (rounding.note(),)
    return ()


class _Rounding:
    """Called with each linear and what it is given; has it compute with its rounded weight from there on."""

    def __init__(
        self, context: Context, examples: list[Example], linears: dict[nn.Module, nn.Linear], progress: Any
    ) -> None:
        self._context, self._examples, self._linears = context, examples, linears
        self._progress = progress
        self._siblings = _siblings(linears, context)
        self._stamps: dict[int, Stamp] = {}
        self._moments: list[InputMoments] = []
        self._rows = 0

    def __call__(self, module: nn.Module, inputs: dict[int, Tensor]) -> Compute | None:
        linear = self._linears[module]
        moments = self._moments_of(inputs)
        packed = self._rounded(linear, moments)
        self._context.calibrated.keep(linear.weight, packed)
        self._progress.update()
        return lambda input: packed_linear(input, packed, linear.bias)

    def _moments_of(self, inputs: dict[int, Tensor]) -> list[InputMoments]:
        """By how much they are damped; those of the linear before where it was given the same (query, key and value)."""
        if self._stamps.keys() == inputs.keys() and all(
            self._stamps[number].holds(input) for number, input in inputs.items()
        ):
            return self._moments
        self._stamps = {number: Stamp(input) for number, input in inputs.items()}
        features = next(iter(inputs.values())).shape[-1]
        total, rows = torch.zeros(features, features), 0
        for number, input in inputs.items():
            some = self._examples[number].rows(input).float()
            total.addmm_(some.T, some)
            rows += len(some)
        total /= max(rows, 1)
        self._rows = max(self._rows, rows)
        self._moments = [InputMoments(total, damping) for damping in _DAMPINGS]
        return self._moments

    def _rounded(self, linear: nn.Linear, moments: list[InputMoments]) -> PackedWeight:
        """Rounded for the examples as far as it stays close to the weight for other inputs, too."""
        weight, group = linear.weight.detach().float(), self._context.config.int4_group
        form = nearest_form(torch.cat(self._siblings[linear.weight.data_ptr()]), "int4", group)
        plain = pack_linear(weight, form, int4_group=group)
        before = moments[0].error(weight, unpack_linear(plain))
        for some in moments:
            packed = pack_rounded(weight, some, form, group)
            values = unpack_linear(packed)
            near = (values - weight).norm() <= _FAR * PACKED.of("int4") * weight.norm()
            if near and some.error(weight, values) < before:
                return packed
        return plain

    def note(self) -> str:
        """What was done, for the plan."""
        kept, reached = self._context.calibrated, len(self._context.calibrated)
        note = f"calibrated on {self._rows} rows: {reached} of {len(self._linears)} int4 linears"
        missed = [linear for linear in self._linears.values() if kept.of([linear.weight]) is None]
        if missed:
            paths = [path for path, module in self._context.modules if self._linears.get(module) in missed]
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            note += (
                f"; no example reached {', '.join(paths[:3])}{more}: these are rounded without calibration"
            )
        return note


def _target(path: str, module: nn.Module, context: Context) -> nn.Linear | None:
    """`module` as a linear, if that is to be packed in four bits."""
    linear = module if isinstance(module, nn.Linear) else as_linear(module)
    if linear is None or linear_refusal(linear, path, context) is not None:
        return None
    return linear if context.weight_dtype(path, [linear]) == "int4" else None


def _siblings(linears: dict[nn.Module, nn.Linear], context: Context) -> dict[int, list[Tensor]]:
    """By the address of each weight those which the rules put beside it, so that all get one form."""
    found: dict[int, list[Tensor]] = {}
    for parent in context.root.modules():
        alike: dict[int, list[Tensor]] = {}
        for child in parent.children():
            if child in linears:
                weight = linears[child].weight.detach()
                apart = isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict)
                beside = [] if apart else alike.setdefault(linears[child].in_features, [])
                beside.append(weight)
                found[weight.data_ptr()] = beside
    return found
