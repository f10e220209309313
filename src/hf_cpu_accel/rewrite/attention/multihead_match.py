"""Pack the projections of `nn.MultiheadAttention` around this package's attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.checkpoints.stored_weight import is_stand_in
from hf_cpu_accel.packing.linear import PANEL_FEATURES, QUANTIZED
from hf_cpu_accel.patching.fused_module import empty
from hf_cpu_accel.patching.hooks import carried_attributes, forward_hooks, is_plain
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.attention.multihead import BIAS, PackedMultiheadAttention, biases_of
from hf_cpu_accel.rewrite.attention.processor import AttentionConfig
from hf_cpu_accel.rewrite.core.context import MAX_INTEGER_FEATURES, WEIGHT_DTYPES, Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.core.verify import probe
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.match import free, pack, release
from hf_cpu_accel.rewrite.linear.projection_group import ProjectionGroup
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.tolerance import PACKED

STRUCTURE = "multi-head attention"


class MultiheadAttentionRule:
    """`nn.MultiheadAttention`, whose projections are a parameter of its own and a linear that it reads instead of calling it."""

    name = STRUCTURE

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if type(module) is not nn.MultiheadAttention:
            return None
        return Match(module, path, _unsupported_reason(module, path, context))

    def apply(self, match: Match, context: Context) -> Outcome:
        module: Any = match.module
        path, reason = match.path, match.data
        inside = tuple(module.modules())
        if reason is not None:
            return Outcome((PlanItem.left(path, STRUCTURE, reason),), inside)
        packed, output = _packed(module, path, context)
        if context.verifies:
            reason = _difference(packed, module, output.packed_dtype)
            if reason is not None:
                return Outcome((PlanItem.left(path, STRUCTURE, reason),), inside)
        context.swap(module, packed)
        weight = module.in_proj_weight
        packed.rule = context.rule
        if context.config.originals == "memory":
            vars(packed)["kept"] = weight  # as `nn.Module` would register a parameter
        else:
            free(weight, packed, output.packed_dtype, context)
        release(module.out_proj, output, context)
        nbytes = packed.group.packed.nbytes + output.packed.nbytes
        item = PlanItem(path, STRUCTURE, "linear + attention", output.packed_dtype, nbytes, reason=None)
        return Outcome((item,), inside)


def _unsupported_reason(module: nn.MultiheadAttention, path: str, context: Context) -> str | None:
    reason = refusal_to_swap(module, path, context)
    if reason is not None:
        return reason
    if not is_plain(module.out_proj):
        return "its output projection has hooks, parametrizations or a replaced forward"
    if module.in_proj_weight is None:
        return "kdim or vdim differs from embed_dim"
    if module.bias_k is not None or module.add_zero_attn:
        return "add_bias_kv or add_zero_attn is set"
    if module.embed_dim % PANEL_FEATURES:
        return f"embed_dim={module.embed_dim} is not supported, only multiples of {PANEL_FEATURES}"
    weights = (module.in_proj_weight, module.out_proj.weight)
    if any(map(is_stand_in, weights)):
        return "its weights are tensor subclasses that cannot be read"
    if any(weight.dtype not in WEIGHT_DTYPES for weight in weights):
        return f"weights in {weights[0].dtype} are not supported, only float32 and bfloat16"
    if any(context.weights.is_tied(weight) for weight in weights):
        return "it shares its weights with other modules"
    if context.dtypes.at(path) in QUANTIZED and module.embed_dim > MAX_INTEGER_FEATURES:
        return f"integer sums over {module.embed_dim} input features would overflow"
    return None


def _packed(
    module: nn.MultiheadAttention, path: str, context: Context
) -> tuple[PackedMultiheadAttention, PackedLinear]:
    features = module.embed_dim
    inputs = nn.Linear(features, 3 * features, bias=False, device="meta")
    assert module.in_proj_weight is not None
    inputs.weight = module.in_proj_weight
    dtype = context.dtypes.of_weight(path, [inputs])
    group_size, measured = context.config.int4_group, context.measured
    whole = pack([inputs], dtype, int4_group=group_size)[0]
    output = pack([module.out_proj], dtype, int4_group=group_size, measured=measured)[0]
    group = ProjectionGroup(
        whole.group.packed,
        [(number * features, (number + 1) * features) for number in range(3)],
        biases_of(module.in_proj_bias),
        measured=measured,
        permutation=whole.permutation,
    )
    rounded = dtype != "float32" and hardware.native_bf16_is_fast()
    packed = empty(PackedMultiheadAttention, type(module))
    assert isinstance(packed, PackedMultiheadAttention)
    packed.__dict__.update(carried_attributes(module))
    packed.__dict__.update(
        _modules={"out_proj": output},
        _parameters={BIAS: module.in_proj_bias, "bias_k": None, "bias_v": None},
        _hooks_inside=tuple(forward_hooks(output)),
        group=group,
        config=AttentionConfig(rounded, measured),
        weight_dtype=module.in_proj_weight.dtype,
        training=False,
        _values={},
    )
    return packed, output


def _difference(packed: nn.Module, module: nn.MultiheadAttention, dtype: str) -> str | None:
    weight = module.out_proj.weight
    states, others = (probe(module.embed_dim, weight.dtype, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        for key in (states, others):
            ours, theirs = (
                attention(states, key, key, need_weights=False)[0] for attention in (packed, module)
            )
            reason = compare(ours, theirs).reason(PACKED.of(dtype, weight.dtype))
            if reason is not None:
                return reason
    return None
