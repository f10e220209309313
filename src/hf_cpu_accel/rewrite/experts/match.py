"""Pack modules with the weights of all experts of a mixture, and compute them in one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.checkpoints.stored_stack import LinearsStack, StoredStack
from hf_cpu_accel.checkpoints.stored_weight import is_stand_in
from hf_cpu_accel.packing.linear import PANEL_FEATURES, QUANTIZED
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.patching.restore import free_weight
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import MAX_INTEGER_FEATURES, Context
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.experts.form import ExpertsForm, Stack, holds_experts, read_experts
from hf_cpu_accel.rewrite.experts.layer import PackedExperts, PackedStack, pack_experts
from hf_cpu_accel.rewrite.linear.match import free
from hf_cpu_accel.tolerance import PACKED, STORED_EXPERTS

STRUCTURE = "experts"


class ExpertsRule:
    """Modules of transformers with a parameter [experts, out_features, in_features] for each projection.

    The implementation that the config asks for (`experts_implementation`) has no effect then.
    """

    name = "experts"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if isinstance(module, PackedExperts) or not holds_experts(module):
            return None
        return Match(module, path, _unsupported_reason(module, path, context))

    def apply(self, match: Match, context: Context) -> Outcome:
        module, path, reason = match.module, match.path, match.data
        dtype = context.dtypes.at(path)
        form = read_experts(module) if reason is None else None
        if form is None:
            reason = reason or "it does not match gated or plain experts with a supported activation"
        else:
            reason = _unsupported_size(module, form, dtype)
        if form is None or reason is not None:
            return Outcome((PlanItem.left(path, STRUCTURE, reason or ""),), (module,))
        packed = pack_experts(module, form, dtype, context.config.int4_group)
        stored = _stored_stacks(module, form)
        if context.verifies:
            bound = (
                STORED_EXPERTS.of(packed.weight_dtype) if stored else PACKED.of(dtype, packed.weight_dtype)
            )
            reason = _verify(module, packed, bound)
            if reason is not None:
                return Outcome((PlanItem.left(path, STRUCTURE, reason),), (module,))
        packed.rule = context.rule
        context.swap(module, packed)
        nbytes = sum(weight.nbytes for weight in packed.packed.values())
        structure = STRUCTURE
        if stored:
            structure = f"{STRUCTURE} ({stored[form.up].form})"
            dtype = packed.packed[form.up.name].dtype
        _release(module, packed, context)
        item = PlanItem(path, structure, "experts_ffn", dtype, nbytes, reason=None)
        return Outcome((item,), tuple(module.modules()))


def _unsupported_reason(module: nn.Module, path: str, context: Context) -> str | None:
    if context.skipped(path):
        return "skip_modules"
    if not is_plain(module) or not context.tree.slots[id(module)]:
        return "it has hooks, parametrizations or a replaced forward, or is the target itself"
    unknown = (p for p in module.parameters() if is_stand_in(p) and not isinstance(p, StoredStack))
    for parameter in unknown:
        return f"its weights are {type(parameter).__name__}s, which cannot be read"
    for parameter in module.parameters():
        if isinstance(parameter, StoredStack) and parameter.refusal is not None:
            return parameter.refusal
    if any(context.weights.is_tied(p) for p in module.parameters()):
        return "it shares its weights with other modules"
    return None


def _unsupported_size(module: nn.Module, form: ExpertsForm, dtype: str) -> str | None:
    """Return why the op does not support experts of this size, or None."""
    shape = module.get_parameter(form.down.name).shape
    features = shape[1:]
    if any(size % PANEL_FEATURES for size in features):
        return f"experts of {tuple(features)} features are not supported: both must be multiples of {PANEL_FEATURES}"
    if dtype in QUANTIZED and max(features) > MAX_INTEGER_FEATURES:
        return f"integer sums over {max(features)} features would overflow"
    return None


def _verify(module: nn.Module, packed: PackedExperts, allowed: float) -> str | None:
    weights = packed.weights
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weights.features, generator=generator).to(packed.weight_dtype)
    index = torch.rand(4, weights.experts, generator=generator).topk(min(2, weights.experts)).indices
    share = torch.rand(index.shape, generator=generator).to(x.dtype)
    with torch.no_grad():
        return compare(packed(x, index, share), module(x, index, share)).reason(allowed)


def _release(module: nn.Module, packed: PackedExperts, context: Context) -> None:
    """Free the weights of experts that were replaced, unless they are kept."""
    parameters = {stack.name: module.get_parameter(stack.name) for stack in packed.form.stacks()}
    if context.config.originals == "memory":
        packed.keep_originals(parameters)
        return
    stored = _stored_stacks(module, packed.form)
    if stored:
        _release_stored(stored, packed, context)
        return
    for stack in packed.form.stacks():
        free(parameters[stack.name], PackedStack(packed, stack), packed.packed[stack.name].dtype, context)


def _stored_stacks(module: nn.Module, form: ExpertsForm) -> dict[Stack, StoredStack]:
    """Return the projections that the checkpoint has quantized: all of them, or none."""
    found: dict[Stack, Any] = {stack: module.get_parameter(stack.name) for stack in form.stacks()}
    return {stack: parameter for stack, parameter in found.items() if isinstance(parameter, StoredStack)}


def _release_stored(stored: dict[Stack, StoredStack], packed: PackedExperts, context: Context) -> None:
    """Free parameters that hold the quantized tensors of a checkpoint."""
    for stack, parameter in stored.items():
        for tensor in parameter.held.values():
            context.weights.freed += tensor.nbytes
            source = PackedStack(packed, stack, is_of_linears=isinstance(parameter, LinearsStack))
            free_weight(context.journal, tensor, source, context.store, lossless=False, is_cast=False)
