"""Fusion of a whole transformer encoder layer into `encoder_layer`, with one start of the threads instead of six.

The ops of earlier passes are read backward from the end of the layer:

    norms last    n = norm(x + output(attention(split(x))));   norm(n + ffn(n))
    norms first   y = x + output(attention(split(norm(x))));   y + ffn(norm(y))

All positions are computed, including padding, because the output of a graph must not depend on the fusion.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from hf_cpu_accel.abi import NORM_KINDS
from hf_cpu_accel.compiler.passes.linear import LinearCall
from hf_cpu_accel.compiler.passes.match import (
    VIEWS,
    args_of,
    argument,
    axis,
    is_call,
    same_size,
    same_sizes,
    value,
)
from hf_cpu_accel.compiler.rewriter import Rewriter, aten
from hf_cpu_accel.packing.linear import PANEL_FEATURES, dtype_of

ours = torch.ops.hf_cpu_accel
# Arguments with the same names in `ffn` and `encoder_layer`.
_FFN_ARGUMENTS = (
    *("up", "up_scale", "up_bias", "down", "down_scale", "down_bias"),
    *("intermediate_features", "activation"),
)
_LAYER_NORMS = [NORM_KINDS.index("layer_norm")] * 2  # of attention and of the feed-forward network


@dataclass(frozen=True)
class _Attention:
    """Attention on the parts of one `linear_split`, up to its output [B, L, A].

    Attributes:
        split: the arguments input, weight, scale, bias and sizes of `linear_split`.
        qkv_order: the indices of query, key and value in its outputs.
        inside: the nodes between, each used only in the layer.
    """

    split: tuple[Any, ...]
    qkv_order: list[int]
    head_size: int
    scale: float | None
    mask: Node | None
    inside: list[Node]


def fuse_encoder_layers(rewriter: Rewriter) -> int:
    """Replace transformer encoder layers by `encoder_layer`. Return how many."""
    fuse = {ours.layer_norm.default: _norms_last, ours.ffn.default: _norms_first}
    return sum(fuse[node.target](rewriter, node) for node in rewriter.calls(*fuse))  # type: ignore[index]


def _norms_last(rewriter: Rewriter, node: Node) -> bool:
    ffn = argument(node, "input")
    if not is_call(ffn, ours.ffn.default):
        return False
    middle = argument(ffn, "input")
    if (
        argument(ffn, "residual") is not middle
        or not is_call(middle, ours.layer_norm.default)
        or len(middle.users) != 1
    ):
        return False
    return _fuse(rewriter, node, argument(middle, "input"), middle, ffn, node, pre_norm=False)


def _norms_first(rewriter: Rewriter, node: Node) -> bool:
    normed, output = argument(node, "input"), argument(node, "residual")
    if (
        not is_call(normed, ours.layer_norm.default)
        or argument(normed, "input") is not output
        or len(normed.users) != 1
    ):
        return False
    if not is_call(output, ours.linear.default) or len(output.users) != 2:
        return False
    attention = _read_attention(rewriter, LinearCall.of(output).input)
    before = attention.split[0] if attention is not None else None
    if not is_call(before, ours.layer_norm.default) or len(before.users) != 1:
        return False
    return _fuse(rewriter, node, output, before, node, normed, pre_norm=True)


def _fuse(
    rewriter: Rewriter,
    node: Node,
    output: object,
    attention_norm: Node,
    ffn: Node,
    ffn_norm: Node,
    pre_norm: bool,
) -> bool:
    """Replace the layer that ends in `node` by one call, if its attention matches."""
    if not is_call(output, ours.linear.default):
        return False
    call = LinearCall.of(output)
    attention = _read_attention(rewriter, call.input)
    if attention is None or call.activation != "none" or call.residual is None:
        return False
    hidden = argument(attention_norm, "input") if pre_norm else attention.split[0]
    inner = [ffn] if ffn is not node else []
    if not pre_norm and len(call.node.users) != 1:
        return False
    if (
        call.residual is not hidden
        or value(hidden).dim() != 3
        or any(len(n.users) != 1 for n in attention.inside + inner)
    ):
        return False
    ffn_arguments = {name: argument(ffn, name) for name in _FFN_ARGUMENTS}
    _, qkv, qkv_scale, qkv_bias, sizes = attention.split
    weights = (qkv, call.weight, ffn_arguments["up"], ffn_arguments["down"])
    if len({dtype_of(value(weight)) for weight in weights}) != 1:
        return False
    if not call.out_features == argument(ffn, "out_features") == value(hidden).shape[2]:
        return False
    if rewriter.is_written(hidden):
        return False
    mask = attention.mask
    while mask is not None and value(mask).dim() < 4:
        mask = rewriter.call(node, aten.unsqueeze.default, mask, 1)  # [B, L] -> [B, 1, 1, L]
    layer = rewriter.call(
        node,
        ours.encoder_layer.default,
        hidden_states=hidden,
        mask=mask,
        window=0,
        qkv=qkv,
        qkv_scale=qkv_scale,
        qkv_bias=qkv_bias,
        order=attention.qkv_order,
        head_size=attention.head_size,
        attention_scale=attention.scale,
        output=call.weight,
        output_scale=call.scale,
        output_bias=call.bias,
        **_norm("attention_norm", attention_norm),
        **ffn_arguments,
        **_norm("ffn_norm", ffn_norm),
        attention_features=sizes[0],
        norm_before=pre_norm,
        narrow=dtype_of(value(qkv)) != "float32",
        norms=_LAYER_NORMS,
        gated=False,
        attention_gain=None,
        ffn_gain=None,
    )
    rewriter.replace(node, layer)
    return True


def _norm(name: str, norm: Node) -> dict[str, Any]:
    """Return the weight, bias and eps of a layer norm as arguments of the layer's norm of that name."""
    return {f"{name}_{part}": argument(norm, part) for part in ("weight", "bias", "eps")}


def _read_attention(rewriter: Rewriter, context: Node) -> _Attention | None:
    if not is_call(context, *VIEWS):
        return None
    attention = args_of(context)[0]
    if not is_call(attention, ours.attention.default) or value(context).dim() != 3:
        return None
    query, key, values, mask, is_causal, scale = args_of(attention)
    parts = [_part(part) for part in (query, key, values)]
    if is_causal or any(part is None for part in parts):
        return None
    splits, places, insides = zip(*(part for part in parts if part is not None), strict=True)
    sizes = args_of(splits[0])[4]
    if len(set(splits)) != 1 or len(sizes) != 3 or len(set(sizes)) != 1 or sizes[0] % PANEL_FEATURES:
        return None
    batch, heads, length, head_size = value(query).shape
    if heads * head_size != sizes[0] or not same_sizes(value(context).shape, (batch, length, sizes[0])):
        return None
    inside = [context, attention, *(node for nodes in insides for node in nodes)]
    return _Attention(args_of(splits[0]), list(places), int(head_size), scale, mask, inside)


def _part(node: object) -> tuple[Node, int, list[Node]] | None:
    """Return the `linear_split`, the index of its output and the nodes between, if `node` [B, heads, L, D] is such an output."""
    if not is_call(node, aten.transpose.int) or {axis(d, 4) for d in args_of(node)[1:3]} != {1, 2}:
        return None
    heads = args_of(node)[0]
    if not is_call(heads, *VIEWS) or not is_call(args_of(heads)[0], operator.getitem):
        return None
    item = args_of(heads)[0]
    split, place = args_of(item)
    if (
        not is_call(split, ours.linear_split.default)
        or len(value(item).shape) != 3
        or value(heads).dim() != 4
    ):
        return None
    if not same_sizes(value(item).shape[:2], value(heads).shape[:2]):
        return None
    if not same_size(value(item).shape[2], value(heads).shape[2] * value(heads).shape[3]):
        return None
    return split, place, [node, heads, item]
