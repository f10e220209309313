"""The stage that rounds four-bit weights for the calibration examples, one linear after another."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hf_cpu_accel.guard.values import Stamp
from hf_cpu_accel.ops.linear import linear as packed_linear
from hf_cpu_accel.packing.four_bits import nearest_form
from hf_cpu_accel.packing.linear import PackedWeight, pack_linear, unpack_linear
from hf_cpu_accel.packing.second_order import DAMPING, InputMoments, pack_rounded
from hf_cpu_accel.rewrite.calibration.walk import Compute, walk
from hf_cpu_accel.rewrite.core.calibrated import calibrated_weights
from hf_cpu_accel.rewrite.core.calibration import Example, call, fitting
from hf_cpu_accel.rewrite.core.context import Context, linear_refusal
from hf_cpu_accel.rewrite.linear.transposed import as_linear
from hf_cpu_accel.tolerance import PACKED

# Share of the allowed error of a weight for inputs unlike the examples, as root mean square.
_FAR = 0.6
_DAMPINGS = (DAMPING, 10 * DAMPING, 100 * DAMPING)


def calibrate(context: Context) -> None:
    """Round int4 weights so that the outputs for `context.calibration` change least.

    Each linear is rounded for the outputs of earlier layers with rounded weights.

    Raises:
        ValueError: the model rejects an example, or the examples reach no linear.
    """
    if not context.calibration or context.static:
        return
    examples = [fitting(example, context.float16 is not None) for example in context.calibration]
    linears = {
        module: linear for path, module in context.tree.modules if (linear := _target(path, module, context))
    }
    with tqdm(total=len(linears), desc="Calibrating", unit="linear", disable=None) as progress:
        rounding = _Rounding(context, examples, linears, progress)
        walk([partial(call, *pair, context.root) for pair in enumerate(examples)], list(linears), rounding)
    context.results.notes.append(rounding.note())


class _Rounding:
    """Round each linear for its inputs, and make it compute with its rounded weight from then on."""

    def __init__(
        self, context: Context, examples: list[Example], linears: dict[nn.Module, nn.Linear], progress: Any
    ) -> None:
        self._context, self._examples, self._linears = context, examples, linears
        self._calibrated = calibrated_weights()
        self._progress = progress
        self._siblings = _siblings(linears, context)
        self._stamps: dict[int, Stamp] = {}
        self._moments: list[InputMoments] = []
        self._rows = 0

    def __call__(self, module: nn.Module, inputs: dict[int, Tensor]) -> Compute | None:
        linear = self._linears[module]
        moments = self._moments_of(inputs)
        packed = self._rounded(linear, moments)
        self._calibrated.keep(linear.weight, packed)
        self._progress.update()
        return lambda input: packed_linear(input, packed, linear.bias)

    def _moments_of(self, inputs: dict[int, Tensor]) -> list[InputMoments]:
        """Return the input moments by damping; those of the previous linear if it had the same inputs (query, key and value)."""
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
        """Return the weight rounded for the examples, as far as it stays close to the original for other inputs, too."""
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
        """Return the note for the plan."""
        kept, reached = self._calibrated, len(self._calibrated)
        note = f"calibrated on {self._rows} rows: {reached} of {len(self._linears)} int4 linears"
        missed = [linear for linear in self._linears.values() if kept.of([linear.weight]) is None]
        if missed:
            paths = [
                path for path, module in self._context.tree.modules if self._linears.get(module) in missed
            ]
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            note += (
                f"; no example reached {', '.join(paths[:3])}{more}: these are rounded without calibration"
            )
        return note


def _target(path: str, module: nn.Module, context: Context) -> nn.Linear | None:
    """Return `module` as a linear if it is to be packed as int4, or None."""
    linear = module if isinstance(module, nn.Linear) else as_linear(module)
    if linear is None or linear_refusal(linear, path, context) is not None:
        return None
    return linear if context.dtypes.of_weight(path, [linear]) == "int4" else None


def _siblings(linears: dict[nn.Module, nn.Linear], context: Context) -> dict[int, list[Tensor]]:
    """Return for the address of each weight the weights that the rules pack next to it, so that all get one form."""
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
