"""Fusion of linear layers with a gated activation between them (GLU variants, Shazeer 2020, arXiv:2002.05202) into `gated_ffn`.

The gate and its factor are two linear layers that read the same tensor (Llama, T5 1.1), or the halves of one (GEGLU in diffusers,
Phi-3). This pass runs before `parallel_linears`, which would join the two.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.activation import read_activation
from hf_cpu_accel.compiler.passes.linear import LinearCall, joined_bias
from hf_cpu_accel.compiler.passes.match import args_of, argument, axis, is_call, only_user, value
from hf_cpu_accel.compiler.rewriter import Rewriter, aten
from hf_cpu_accel.packing.linear import PANEL_FEATURES

ours = torch.ops.hf_cpu_accel
# Ops that split a tensor, and the argument with the sizes.
_DIVISIONS: dict[Any, str] = {
    aten.chunk.default: "chunks",
    aten.split.Tensor: "split_size",
    aten.split_with_sizes.default: "split_sizes",
}


def fuse_gated_ffns(rewriter: Rewriter) -> int:
    """Replace gated feed-forward networks by `gated_ffn`. Return how many."""
    return sum(_fuse(rewriter, node) for node in rewriter.calls(ours.linear.default))


def _fuse(rewriter: Rewriter, node: Node) -> bool:
    down = LinearCall.of(node)
    product = down.input
    if not is_call(product, aten.mul.Tensor) or len(product.users) != 1:
        return False
    for activated, other in (args_of(product), args_of(product)[::-1]):
        found = read_activation(rewriter, activated) if isinstance(activated, Node) else None
        if found is None or len(activated.users) != 1 or not isinstance(other, Node) or len(other.users) != 1:
            continue
        gate, name, users = found
        if len(gate.users) != users or rewriter.is_written(gate, other):
            continue
        up = _two_linears(rewriter, gate, other, down) or _two_halves(rewriter, gate, other, down)
        if up is None:
            continue
        input, weight, scale, bias, gate_last = up
        fused = rewriter.call(
            node,
            ours.gated_ffn.default,
            input=input,
            up=weight,
            up_scale=scale,
            up_bias=bias,
            **down.as_last(),
            intermediate_features=int(value(other).shape[-1]),
            activation=name,
            gate_last=gate_last,
        )
        rewriter.replace(node, fused)
        return True
    return False


# Input, packed weight, scale, bias; whether the gate comes last.
Up = tuple[Node, Node, Node | None, Node | None, bool]


def _two_linears(rewriter: Rewriter, gate: Node, other: Node, down: LinearCall) -> Up | None:
    if not (is_call(gate, ours.linear.default) and is_call(other, ours.linear.default)):
        return None
    calls = [LinearCall.of(gate), LinearCall.of(other)]
    first, second = calls
    origins = [rewriter.sources_of(call.weight) for call in calls]
    if origins[0] is None or origins[1] is None or origins[0][0] != origins[1][0]:
        return None
    if first.input is not second.input or first.out_features != second.out_features:
        return None
    if not all(_joins(rewriter, call, down) for call in calls) or first.out_features % PANEL_FEATURES:
        return None
    if not all(call.bias is None or rewriter.is_constant(call.bias) for call in calls):
        return None
    sources = [origins[0][1][0], origins[1][1][0]]
    data, *scale = rewriter.derived(origins[0][0], sources)
    return first.input, data, scale[0] if scale else None, joined_bias(rewriter, calls), False


def _two_halves(rewriter: Rewriter, gate: Node, other: Node, down: LinearCall) -> Up | None:
    if not (is_call(gate, operator.getitem) and is_call(other, operator.getitem)):
        return None
    (split, first), (other_split, second) = args_of(gate), args_of(other)
    if split is not other_split or {first, second} != {0, 1} or not is_call(split, *_DIVISIONS):
        return None
    both = args_of(split)[0]
    if not is_call(both, ours.linear.default) or only_user(both) is not split:
        return None
    call = LinearCall.of(both)
    if not _joins(rewriter, call, down) or not _is_halved(split, call.out_features):
        return None
    if call.out_features % (2 * PANEL_FEATURES):
        return None
    return call.input, call.weight, call.scale, call.bias, first == 1


def _joins(rewriter: Rewriter, call: LinearCall, down: LinearCall) -> bool:
    """Return whether the layer is only a product, with weights of the same dtype as `down`."""
    return call.is_product_only and call.dtype == down.dtype and not rewriter.is_written(call.node)


def _is_halved(division: Node, features: int) -> bool:
    """Return whether `division` splits the last dimension, of `features` features, into two halves."""
    dims, how = value(args_of(division)[0]).dim(), argument(division, _DIVISIONS[division.target])
    if axis(argument(division, "dim"), dims) != dims - 1:
        return False
    if division.target is aten.chunk.default:
        return how == 2
    return how == features // 2 or (isinstance(how, list | tuple) and list(how) == [features // 2] * 2)
