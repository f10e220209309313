"""Linears whose weight a checkpoint stores quantised: packed as it is, so that what the file says is what is computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from hf_cpu_accel.checkpoints.stored import StoredWeight, pack_stored, stored_weight
from hf_cpu_accel.packing.linear import PANEL_FEATURES
from hf_cpu_accel.patching.journal import free_weight, swap_module
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import MAX_INTEGER_FEATURES, Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.grouping import disable_grouping
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.core.verify import disagreement, probe, run_alone
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.match import ALONE, MERGED, packed_item
from hf_cpu_accel.rewrite.linear.projection_group import ProjectionGroup

# Of the probe: few rows go to a kernel that hosts have for some devices only, more are multiplied by the unpacked weight.
_REPEATED = 3

Member = tuple[str, nn.Module, StoredWeight]


class StoredLinearsRule:
    """Children of one module that hold quantised weights: those with the same in_features lie side by side, as
    `MergedProjectionsRule` has it."""

    name = "stored linears"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        siblings: dict[int, list[list[Member]]] = defaultdict(list)
        for name, child in module.named_children():
            weight = None if id(child) in context.handled else stored_weight(child)
            if weight is None:
                continue
            member = (f"{path}.{name}" if path else name, child, weight)
            groups = siblings[weight.in_features]
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
        for members in match.found:
            kept = [member for member in members if _refusal(member, context) is None]
            items.extend(
                PlanItem.left(member[0], ALONE, reason)
                for member in members
                if (reason := _refusal(member, context)) is not None
            )
            items.extend(_put_in_place(kept, context) if kept else ())
            handled.extend(module for _, module, _ in members)
        return Outcome(tuple(items), tuple(handled))


def _refusal(member: Member, context: Context) -> str | None:
    path, module, weight = member
    if weight.in_features > MAX_INTEGER_FEATURES:
        return f"integer sums over {weight.in_features} input features would overflow"
    return refusal_to_swap(module, path, context) or weight.refusal


def _put_in_place(members: Sequence[Member], context: Context) -> list[PlanItem]:
    """Pack the weights together, compare each linear with its original, and swap them in."""
    structure = MERGED if len(members) > 1 else ALONE
    compute = _compute_dtype(context.root)
    packed = pack_stored([weight for _, _, weight in members])
    ends = list(accumulate(weight.out_features for _, _, weight in members))
    linears = [_as_linear(module, weight, compute) for _, module, weight in members]
    group = ProjectionGroup(
        packed,
        list(zip([0, *ends[:-1]], ends, strict=True)),
        [linear.bias for linear in linears],
        measured=context.measured,
    )
    replacements = [PackedLinear(group, index, linear) for index, linear in enumerate(linears)]
    if context.config.verify:
        for (path, module, _), replacement in zip(members, replacements, strict=True):
            input = probe(replacement.in_features, compute).repeat(_REPEATED, 1, 1)
            with torch.no_grad(), disable_grouping():
                reason = disagreement(replacement(input), run_alone(module, input), "float32", compute)
            if reason is not None:
                return [PlanItem.left(path, structure, reason)]
    for (_, module, weight), replacement in zip(members, replacements, strict=True):
        swap_module(context.journal, context.slots[id(module)], replacement)
        _release(module, weight, replacement, context)
    return [
        packed_item(path, f"{structure} ({weight.form})", "linear", replacement)
        for (path, _, weight), replacement in zip(members, replacements, strict=True)
    ]


def _release(module: nn.Module, weight: StoredWeight, packed: PackedLinear, context: Context) -> None:
    """Free what held the weight of a module that is out of the tree, unless an embedding reads it, too, or it is to be kept."""
    for name in weight.tensors:
        parameter = module.get_parameter(name)
        if context.is_tied(parameter) or context.config.originals == "memory":
            continue
        context.freed += parameter.nbytes
        free_weight(context.journal, parameter, packed, context.store, lossless=False)


def _as_linear(module: nn.Module, weight: StoredWeight, dtype: torch.dtype) -> nn.Linear:
    """A linear of the same shape and with the very bias, whose weight has no values."""
    linear = nn.Linear(weight.in_features, weight.out_features, bias=False, device="meta", dtype=dtype)
    linear.register_parameter("bias", module._parameters.get("bias"))
    return linear


def _compute_dtype(root: nn.Module) -> torch.dtype:
    """That of the model's activations: of its first parameter that is not quantised."""
    floating = (parameter.dtype for parameter in root.parameters() if parameter.is_floating_point())
    return next(floating, torch.float32)
