"""Reading of boolean attention masks from the nodes that compute them.

transformers computes masks [B, 1, Lq, Lk] from `arange`s and the batch's `attention_mask`, once per call. Most are only causality
and key padding. `attention` has an argument for causality and accepts padding as [B, Lk], so the mask is not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.match import (
    args_of,
    is_call,
    is_one,
    is_tensor,
    same_size,
    same_sizes,
    value,
)
from hf_cpu_accel.compiler.rewriter import aten

_AND = (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor)
_TRUE = (aten.new_ones.default, aten.ones.default, aten.ones_like.default)


@dataclass(frozen=True)
class Mask:
    """Attributes:
    causal: query i sees the keys up to i + Lk - Lq.
    padding: bool [B, Lk], True = attend, or None.
    """

    causal: bool = False
    padding: Node | None = None


@dataclass(frozen=True)
class _Index:
    """`arange(size) + start` along dimension `dim` of the mask."""

    dim: int
    size: object
    start: object


def read_mask(node: Node, batch_size: object, q_len: Any, kv_len: Any) -> Mask | None:
    """Return the boolean mask `node`, broadcastable to [B, H, Lq, Lk], as a `Mask`; None if it is anything else."""
    if is_call(node, aten.expand.default):
        return read_mask(args_of(node)[0], batch_size, q_len, kv_len)
    if not is_tensor(node) or value(node).dtype is not torch.bool:
        return None
    if is_call(node, *_AND):
        parts = [
            read_mask(part, batch_size, q_len, kv_len) if is_tensor(part) else None
            for part in args_of(node)[:2]
        ]
        return _both(*parts)
    if is_call(node, *_TRUE):
        return Mask()
    if is_call(node, aten.ge.Scalar) and args_of(node)[1] == 0 and _index(args_of(node)[0]) is not None:
        return Mask()
    if is_call(node, aten.le.Tensor, aten.ge.Tensor):
        keys, queries = args_of(node)[:2] if node.target is aten.le.Tensor else args_of(node)[1::-1]
        return _causal(_index(keys), _index(queries), q_len, kv_len)
    if is_call(node, aten.index.Tensor):
        return _padding(node, batch_size, kv_len)
    return None


def _both(first: Mask | None, second: Mask | None) -> Mask | None:
    if first is None or second is None or (first.padding is not None and second.padding is not None):
        return None
    return Mask(first.causal or second.causal, first.padding if second.padding is None else second.padding)


def _index(node: object) -> _Index | None:
    """Return the range that `node` counts, from 0 or more; None if it is not a range."""
    if is_call(node, aten.unsqueeze.default):
        inner = _index(args_of(node)[0])
        if inner is None:
            return None
        shape = value(node).shape
        filled = [dim for dim, size in enumerate(shape) if not is_one(size)]
        return _Index(filled[0], inner.size, inner.start) if len(filled) == 1 else None
    if is_call(node, aten.add.Tensor):
        inner, added = _index(args_of(node)[0]), args_of(node)[1]
        added = added.meta.get("val") if isinstance(added, Node) else added
        if inner is None or inner.start != 0 or not isinstance(added, int | torch.SymInt):
            return None
        return _Index(inner.dim, inner.size, added) if not isinstance(added, int) or added >= 0 else None
    if is_call(node, aten.arange.default):
        return _Index(0, value(node).shape[0], 0)
    return None


def _causal(keys: _Index | None, queries: _Index | None, q_len: Any, kv_len: Any) -> Mask | None:
    if keys is None or queries is None or (keys.dim, queries.dim) != (3, 2) or keys.start != 0:
        return None
    if not same_sizes((keys.size, queries.size), (kv_len, q_len)):
        return None
    offset = 0 if same_size(q_len, kv_len) else kv_len - q_len
    return Mask(causal=True) if same_size(queries.start, offset) else None


def _padding(node: Node, batch_size: object, kv_len: object) -> Mask | None:
    """`attention_mask[rows, keys]`, all rows and keys of it."""
    source, indices = args_of(node)[:2]
    rows, keys = (_index(index) for index in indices) if len(indices) == 2 else (None, None)
    if rows is None or keys is None or (rows.start, keys.start) != (0, 0):
        return None
    wanted = (batch_size, kv_len)
    if not same_sizes((rows.size, keys.size), wanted) or not same_sizes(value(source).shape, wanted):
        return None
    return Mask(padding=source)
