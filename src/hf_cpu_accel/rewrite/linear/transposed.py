"""Linears that store their weight as [in_features, out_features], such as GPT-2's Conv1D."""

from __future__ import annotations

import torch
from torch import nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.checkpoints.stored_weight import is_stand_in
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import Context, linear_refusal
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.core.verify import probe, run_alone
from hf_cpu_accel.rewrite.linear.match import pack, packed_item, release
from hf_cpu_accel.rewrite.linear.parts import plain_linear
from hf_cpu_accel.tolerance import FORMULA, PACKED

STRUCTURE = "transposed linear"


class TransposedLinearRule:
    """A module with a matrix and optionally a bias that computes input @ matrix + bias."""

    name = "transposed linear"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        linear = as_linear(module)
        if linear is None or not context.tree.slots[id(module)]:
            return None
        return Match(module, path, (linear, linear_refusal(linear, path, context)))

    def apply(self, match: Match, context: Context) -> Outcome:
        linear, reason = match.data
        if reason is not None:
            return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), (match.module,))
        dtype = context.dtypes.of_weight(match.path, [linear])
        packed = pack(
            [linear],
            dtype,
            int4_group=context.config.int4_group,
            measured=context.measured,
            transposed=True,
        )[0]
        if context.verifies:
            input = probe(linear.in_features, linear.weight.dtype)
            with torch.no_grad():
                reason = compare(packed(input), match.module(input)).reason(
                    PACKED.of(dtype, linear.weight.dtype)
                )
            if reason is not None:
                return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), (match.module,))
        context.swap(match.module, packed)
        release(match.module, packed, context)
        item = packed_item(match.path, STRUCTURE, "linear", packed)
        return Outcome((item,), (match.module,))


def as_linear(module: nn.Module) -> nn.Linear | None:
    """Return `module` as a linear over a view of its weight, or None if it computes something else."""
    parameters = dict(module._parameters)
    weight, bias = parameters.pop("weight", None), parameters.pop("bias", None)
    if isinstance(module, nn.Linear) or weight is None or weight.dim() != 2 or weight.numel() == 0:
        return None
    if is_stand_in(weight):
        return None
    if any(p is not None for p in parameters.values()) or module._modules or module._buffers:
        return None
    in_features, out_features = weight.shape
    if not is_plain(module) or (bias is not None and bias.shape != (out_features,)):
        return None
    linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().T, requires_grad=False)
    linear.register_parameter("bias", bias)
    input = probe(in_features, weight.dtype)
    comparison = compare(run_alone(module, input), plain_linear(linear, input))
    return linear if comparison.within(FORMULA.of(weight.dtype)) else None
