"""Replacement of `scaled_dot_product_attention` by `attention`: without repeated heads of keys and values, and without a mask in
memory if it is only causality and padding."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.masks import Mask, read_mask
from hf_cpu_accel.compiler.passes.match import (
    FLOATING,
    args_of,
    argument,
    is_call,
    is_one,
    must_be_same_size,
    same_size,
    same_sizes,
    value,
)
from hf_cpu_accel.compiler.rewriter import Rewriter, aten

ours = torch.ops.hf_cpu_accel


def lower_attention(rewriter: Rewriter) -> int:
    """Replace `scaled_dot_product_attention` by `attention`. Return how many."""
    count = 0
    for node in rewriter.calls(aten.scaled_dot_product_attention.default):
        query, key, value, mask, is_causal, scale = (argument(node, name) for name in _ARGUMENTS)
        if rewriter.number(argument(node, "dropout_p")) != 0:
            continue
        if is_causal and not same_size(query.meta["val"].shape[2], key.meta["val"].shape[2]):
            continue  # torch aligns to the first key, `attention` to the last
        number = None if scale is None else rewriter.number(scale)
        if scale is not None and number is None:
            continue
        count += replace_by_attention(
            rewriter, node, query, key, value, mask, is_causal=is_causal, scale=number
        )
    return count


_ARGUMENTS = ("query", "key", "value", "attn_mask", "is_causal", "scale")


def replace_by_attention(
    rewriter: Rewriter,
    node: Node,
    query: Node,
    key: Node,
    values: Node,
    mask: Node | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> bool:
    """Replace `node` of shape [B, Hq, Lq, Dv] by `attention`. Return whether its shapes and dtypes allow it."""
    key, values = _unrepeated(key), _unrepeated(values)
    if not _fit(node, query, key, values) or rewriter.is_written_before(node, query, key, values):
        return False
    mask, read = _mask(rewriter, node, query, key, mask)
    if read is None:
        return False
    causal = is_causal or read.causal
    attended = rewriter.call(node, ours.attention.default, query, key, values, mask, causal, scale)
    rewriter.replace(node, rewriter.call(node, aten.transpose.int, attended, 1, 2))
    return True


def _fit(node: Node, query: Node, key: Node, values: Node) -> bool:
    q, k, v = (value(part) for part in (query, key, values))
    if {q.dim(), k.dim(), v.dim()} != {4} or q.dtype not in FLOATING or len({q.dtype, k.dtype, v.dtype}) != 1:
        return False
    if value(node).dtype is not q.dtype:
        return False
    heads = [part.shape[1] for part in (q, k)]
    if any(isinstance(number, torch.SymInt) for number in heads) or heads[0] % heads[1]:
        return False
    if not same_size(k.shape[1], v.shape[1]) or not same_size(q.shape[3], k.shape[3]):
        return False
    # Caches may have their own symbols for sequences and tokens.
    pairs = (q.shape[0], k.shape[0]), (k.shape[0], v.shape[0]), (k.shape[2], v.shape[2])
    return all(must_be_same_size(*pair) for pair in pairs)


def _mask(
    rewriter: Rewriter, node: Node, query: Node, key: Node, mask: Node | None
) -> tuple[Node | None, Mask | None]:
    """Return the mask argument of the op and the `Mask` that was read; (any, None) for an unsupported mask."""
    if mask is None:
        return None, Mask()
    (batch, heads, q_len, _), kv_len = value(query).shape, value(key).shape[2]
    tensor = value(mask)
    if tensor.dtype is torch.bool:
        read = read_mask(mask, batch, q_len, kv_len)
        if read is not None:
            return read.padding, read
    if tensor.dtype not in (torch.bool, *FLOATING) or tensor.dim() > 4:
        return None, None
    wanted = (batch, heads, q_len, kv_len)[4 - tensor.dim() :]
    if not all(
        is_one(size) or same_size(size, full) for size, full in zip(tensor.shape, wanted, strict=True)
    ):
        return None, None
    while value(mask).dim() < 4:
        mask = rewriter.call(node, aten.unsqueeze.default, mask, 0)
    if is_one(value(mask).shape[3]) and not is_one(kv_len):
        return None, None
    return mask, Mask()


def _unrepeated(node: Node) -> Node:
    """Return keys or values before their heads were repeated for groups of query heads, expanded to [B, Hkv, G, L, D]."""
    if not is_call(node, aten.reshape.default, aten.view.default):
        return node
    expanded = args_of(node)[0]
    if not is_call(expanded, aten.expand.default) or not is_call(
        args_of(expanded)[0], aten.unsqueeze.default
    ):
        return node
    inner = args_of(expanded)[0]
    source: Any = args_of(inner)[0]
    before, repeated, after = value(source).shape, value(expanded).shape, value(node).shape
    if len(before) != 4 or args_of(inner)[1] != 2:
        return node
    is_repeat = same_sizes((*repeated[:2], *repeated[3:]), before) and same_sizes(
        (before[0], before[1] * repeated[2], *before[2:]), after
    )
    return source if is_repeat else node
