"""Linears whose weight a checkpoint stores quantized: packed without another rounding, so that the stored values are computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.checkpoints.stored import (
    is_stored,
    pack_rounded,
    pack_stored,
    rounding_error,
    stored_weight,
)
from hf_cpu_accel.checkpoints.stored_weight import StoredWeight
from hf_cpu_accel.packing.linear import PANEL_FEATURES, PackedWeight
from hf_cpu_accel.patching.restore import free_weight, share_values
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import MAX_INTEGER_FEATURES, Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.grouping import disable_grouping
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.core.verify import probe
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.match import (
    ALONE,
    MERGED,
    LinearRule,
    MergedProjectionsRule,
    packed_item,
)
from hf_cpu_accel.rewrite.linear.projection_group import ProjectionGroup
from hf_cpu_accel.tolerance import PACKED

# Rows of the probe: hosts use a device-specific kernel for few rows, and multiply more by the unpacked weight.
_REPEATED = 3

Member = tuple[str, nn.Module, StoredWeight]


class StoredLinearsRule:
    """Children of one module with quantized weights: those with the same input features in the same order are packed side by
    side, as in `MergedProjectionsRule`."""

    name = "stored linears"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        siblings: dict[tuple[object, ...], list[list[Member]]] = defaultdict(list)
        for name, child in module.named_children():
            weight = None if id(child) in context.tree.handled else stored_weight(child)
            if weight is None:
                continue
            member = (f"{path}.{name}" if path else name, child, weight)
            order = None if weight.permutation is None else weight.permutation.numpy().tobytes()
            own = context.dtypes.own(member[0]) if weight.rows is None else None
            groups = siblings[weight.in_features, weight.rows is None, weight.meant_for, own, order]
            apart = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
            if groups and not apart and groups[-1][-1][2].out_features % PANEL_FEATURES == 0:
                groups[-1].append(member)
            else:
                groups.append([member])
        found = [group for groups in siblings.values() for group in groups]
        return Match(module, path, found) if found else None

    def apply(self, match: Match, context: Context) -> Outcome:
        items: list[PlanItem] = []
        handled: list[nn.Module] = []
        for members in match.data:
            kept = [member for member in members if _unsupported_reason(member, context) is None]
            items.extend(
                PlanItem.left(member[0], ALONE, reason)
                for member in members
                if (reason := _unsupported_reason(member, context)) is not None
            )
            items.extend(_put_in_place(kept, context) if kept else ())
            handled.extend(module for _, module, _ in members)
        return Outcome(tuple(items), tuple(handled))


def _unsupported_reason(member: Member, context: Context) -> str | None:
    path, module, weight = member
    if weight.in_features > MAX_INTEGER_FEATURES:
        return f"integer sums over {weight.in_features} input features would overflow"
    return refusal_to_swap(module, path, context) or weight.refusal


def _put_in_place(members: Sequence[Member], context: Context) -> list[PlanItem]:
    """Pack the weights together, compare each linear with its original, and swap them in."""
    structure = MERGED if len(members) > 1 else ALONE
    compute = _compute_dtype(context.root)
    linears = [_as_linear(module, weight, compute) for _, module, weight in members]
    packed, dtype, errors = _packed(members, linears, context)
    ends = list(accumulate(weight.out_features for _, _, weight in members))
    group = ProjectionGroup(
        packed,
        list(zip([0, *ends[:-1]], ends, strict=True)),
        [linear.bias for linear in linears],
        measured=context.measured,
        permutation=members[0][2].permutation,
    )
    replacements = [PackedLinear(group, index, linear) for index, linear in enumerate(linears)]
    if context.config.verify:
        for (path, module, weight), replacement in zip(members, replacements, strict=True):
            agreement = max(weight.agreement, dtype, key=PACKED.of)
            reason = _disagreement(module, weight, replacement, agreement, compute)
            if reason is not None:
                return [PlanItem.left(path, structure, reason)]
    items = []
    for (path, module, weight), replacement, error in zip(members, replacements, errors, strict=True):
        # In a packed folder they are plain linears.
        replacement.rule = (MergedProjectionsRule if len(members) > 1 else LinearRule).name
        context.swap(module, replacement)
        _release(weight, replacement, context)
        rounded = f"; rounding to {packed.dtype}: {error:.1e}" if error else ""
        items.append(packed_item(path, f"{structure} ({weight.form}{rounded})", "linear", replacement))
    return items


def _packed(
    members: Sequence[Member], linears: Sequence[nn.Linear], context: Context
) -> tuple[PackedWeight, str, list[float]]:
    """Return the packed weight, the dtype whose tolerance applies, and the rounding error of each member against the stored
    weight."""
    weights = [weight for _, _, weight in members]
    if weights[0].rows is not None:
        return pack_stored(weights), "float32", [rounding_error(weight) for weight in weights]
    path, meant_for = members[0][0], weights[0].meant_for
    if meant_for is not None and context.config.dtype == "auto" and context.dtypes.own(path) is None:
        dtype = meant_for
    else:
        dtype = context.dtypes.of_weight(path, linears)
    packed, errors = pack_rounded(weights, dtype, context.config.int4_group)
    return packed, dtype, errors


def _disagreement(
    module: nn.Module, weight: StoredWeight, replacement: PackedLinear, agreement: str, compute: torch.dtype
) -> str | None:
    input = probe(replacement.in_features, compute).repeat(_REPEATED, 1, 1)
    with torch.no_grad(), disable_grouping():
        expected = call_foreign(weight.reference or module.forward, input)
        if isinstance(expected, Refusal):
            return f"its own forward fails here, so the packed weight cannot be verified: {expected.reason}"
        return compare(replacement(input), expected).reason(PACKED.of(agreement, compute))


def _release(weight: StoredWeight, packed: PackedLinear, context: Context) -> None:
    """Free the tensors of the weight of a module that was replaced, unless an embedding reads it, too, or it is kept."""
    if context.config.originals == "memory" or any(map(context.weights.is_tied, weight.tensors)):
        return
    for tensor in weight.tensors[1:]:
        owner = weight.tensors[0]
        if tensor.numel() and tensor.data_ptr() == owner.data_ptr():
            share_values(context.journal, tensor, owner)
    for tensor in weight.tensors:
        context.weights.freed += tensor.nbytes
        if tensor.numel():
            free_weight(context.journal, tensor, packed, context.store, lossless=False, is_cast=False)


def _as_linear(module: nn.Module, weight: StoredWeight, dtype: torch.dtype) -> nn.Linear:
    """Return a linear of the same shape and with the same bias, whose weight has no values."""
    linear = nn.Linear(weight.in_features, weight.out_features, bias=False, device="meta", dtype=dtype)
    bias = getattr(module, "bias", None)
    bias = bias() if callable(bias) else bias  # torch.ao keeps it inside of its packed weight
    if bias is not None and not isinstance(bias, nn.Parameter):  # HQQ has it as a plain attribute
        bias = nn.Parameter(bias, requires_grad=False)
    linear.register_parameter("bias", bias)
    return linear


def _compute_dtype(root: nn.Module) -> torch.dtype:
    """Return the dtype of the model's activations: that of its first parameter that is not quantized."""
    floating = (
        parameter.dtype
        for module in root.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_floating_point() and not is_stored(module, name)
    )
    return next(floating, torch.float32)
