"""Pack linears: siblings that read the same features in one packed weight, the others separately."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.packing.four_bits import nearest_form
from hf_cpu_accel.packing.linear import PANEL_FEATURES, pack_linear
from hf_cpu_accel.patching.restore import Packed, free_weight
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.calibrated import calibrated_weight
from hf_cpu_accel.rewrite.core.context import Context, linear_refusal
from hf_cpu_accel.rewrite.core.grouping import disable_grouping
from hf_cpu_accel.rewrite.core.packed_module import PackedModule
from hf_cpu_accel.rewrite.core.packed_source import saved_weight, source
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.core.verify import probe
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.projection_group import ProjectionGroup
from hf_cpu_accel.runtime.memory import trim_heap
from hf_cpu_accel.tolerance import PACKED

_TRIM_BYTES = 24 << 20  # with 64 the peak of a load rose by up to 80 MB now and then

_OUTPUTS = ("o_proj", "out_proj")  # names in transformers; they only determine the order of weights

FEW_WEIGHTS = 256  # of a linear that is fused with nothing: torch's call takes less
MERGED = "merged projections"
ALONE = "linear"


def pack(
    linears: Sequence[nn.Linear],
    dtype: str,
    *,
    int4_group: int = 32,
    measured: bool = False,
    transposed: bool = False,
) -> list[PackedLinear]:
    """Return packed replacements for `linears`, which share one packed weight. The originals are not changed.

    With `measured`, other providers may serve where they were measured to be faster. `transposed` is the layout of the
    original weights.

    Raises:
        NotPacked: packed weights come from a file, which does not have these.
    """
    weights = [linear.weight.detach() for linear in linears]
    saved, permutation = saved_weight(*weights), None
    rounded = calibrated_weight(weights, dtype)
    if saved is not None:
        packed, permutation = saved.packed, saved.permutation
    elif rounded is not None:
        packed = rounded
    else:
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        packed = pack_linear(whole, nearest_form(whole, dtype, int4_group), int4_group=int4_group)
    ranges, start = [], 0
    for linear in linears:
        ranges.append((start, start + linear.out_features))
        start += linear.out_features
    biases = [linear.bias for linear in linears]
    group = ProjectionGroup(packed, ranges, biases, measured=measured, permutation=permutation)
    return [PackedLinear(group, index, linear, transposed=transposed) for index, linear in enumerate(linears)]


def release(module: nn.Module, packed: PackedModule, context: Context) -> None:
    """Free the weight of a module that was replaced, unless other modules need it or it is kept."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    packed.rule = context.rule
    if id(module) in context.weights.computed:
        return  # the sources of its weight stay
    if context.weights.is_tied(weight) or context.config.originals == "memory":
        packed.keep_original(weight)
        return
    free(weight, packed, packed.packed_dtype, context, exact=packed.is_exact)


def free(weight: nn.Parameter, packed: Packed, dtype: str, context: Context, *, exact: bool = True) -> None:
    """Free the values of `weight`, which `packed` holds in `dtype`."""
    if id(weight) in context.weights.created:
        weight.data = torch.empty(0, dtype=weight.dtype)
        return
    lossless = exact and (dtype == "float32" or (dtype == "bfloat16" and weight.dtype is torch.bfloat16))
    context.weights.freed += weight.nbytes
    free_weight(context.journal, weight, packed, context.store, lossless=lossless)
    if context.weights.freed > _TRIM_BYTES:
        # A packed weight may not fit into the hole that an original left: return the holes to the system.
        trim_heap()
        context.weights.freed = 0


def packed_item(path: str, structure: str, op: str, packed: PackedLinear) -> PlanItem:
    """Return the row of a packed linear."""
    return PlanItem(path, structure, op, packed.packed_dtype, packed.packed.nbytes, reason=None)


def put_in_place(
    paths: Sequence[str], linears: Sequence[nn.Linear], structure: str, context: Context
) -> Outcome:
    """Pack `linears` together, compare each with its original, and swap them in."""
    dtype = context.dtypes.of_weight(paths[0], linears)
    packed = pack(linears, dtype, int4_group=context.config.int4_group, measured=context.measured)
    if context.verifies:
        for path, linear, replacement in zip(paths, linears, packed, strict=True):
            input = probe(linear.in_features, linear.weight.dtype)
            with torch.no_grad(), disable_grouping():  # these calls must not be recorded
                reason = compare(replacement(input), linear(input)).reason(
                    PACKED.of(dtype, linear.weight.dtype)
                )
            if reason is not None:
                return Outcome((PlanItem.left(path, structure, reason),), (linear,))
    for linear, replacement in zip(linears, packed, strict=True):
        context.swap(linear, replacement)
        release(linear, replacement, context)
    items = (
        packed_item(path, structure, "linear", replacement)
        for path, replacement in zip(paths, packed, strict=True)
    )
    return Outcome(tuple(items), tuple(linears))


class MergedProjectionsRule:
    """Children of one module with the same in_features, such as query, key and value, or gate and up.

    Here they are only packed side by side; at run time `ProjectionGroup` finds those that share an input. Containers that call
    their children one after the other (Sequential, ModuleList) have no such siblings.
    """

    name = "merged projections"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            return None
        siblings: dict[tuple[object, ...], list[tuple[str, nn.Linear]]] = defaultdict(list)
        saved = source()
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if not isinstance(child, nn.Linear) or id(child) in context.tree.handled:
                continue
            if linear_refusal(child, child_path, context) is None and not context.weights.is_tied(
                child.weight
            ):
                together = () if saved is None else saved.together(child.weight)
                alike = (child.in_features, child.weight.dtype, together, context.dtypes.own(child_path))
                siblings[alike].append((child_path, child))
        if saved is None:
            groups = [_in_panels(_without_output(members)) for members in siblings.values()]
        else:
            groups = [_in_panels(members) for members in siblings.values()]
        groups = [members for members in groups if len(members) > 1]
        return Match(module, path, groups) if groups else None

    def apply(self, match: Match, context: Context) -> Outcome:
        items: list[PlanItem] = []
        handled: list[nn.Module] = []
        for members in match.data:
            paths = [path for path, _ in members]
            outcome = put_in_place(paths, [linear for _, linear in members], MERGED, context)
            items.extend(outcome.items)
            handled.extend(outcome.handled)
        return Outcome(tuple(items), tuple(handled))


class LinearRule:
    """A single linear."""

    name = "linear"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if not isinstance(module, nn.Linear):
            return None
        return Match(module, path, linear_refusal(module, path, context) or _too_small(module))

    def apply(self, match: Match, context: Context) -> Outcome:
        if match.data is not None:
            return Outcome((PlanItem.left(match.path, ALONE, match.data),), (match.module,))
        assert isinstance(match.module, nn.Linear)
        return put_in_place([match.path], [match.module], ALONE, context)


def _too_small(linear: nn.Linear) -> str | None:
    """Return why a linear that is not fused is not packed: its call takes a microsecond longer than torch's, which a small
    product does not gain back."""
    weights = linear.in_features * linear.out_features
    if weights > FEW_WEIGHTS or source() is not None:
        return None
    return f"it has only {weights} weights: packing gains nothing"


def _without_output(members: list[tuple[str, nn.Linear]]) -> list[tuple[str, nn.Linear]]:
    """Return the members without attention's output projection, if a gate of attention follows it, which has to be next to
    query, key and value (AFMoE). As the last member it may stay."""
    names = [path.rpartition(".")[2] for path, _ in members]
    between = [number for number, name in enumerate(names[:-1]) if name in _OUTPUTS]
    return [member for number, member in enumerate(members) if number not in between]


def _in_panels(members: list[tuple[str, nn.Linear]]) -> list[tuple[str, nn.Linear]]:
    """Return the members that can be packed side by side in whole panels of 32 features; at most one other one, which comes
    last."""
    whole = [member for member in members if member[1].out_features % PANEL_FEATURES == 0]
    ragged = [member for member in members if member[1].out_features % PANEL_FEATURES]
    return whole + ragged[:1]
