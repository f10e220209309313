"""Replacement of rotary positions, x * cos + rotate_half(x) * sin, by `rotary_embedding` (Su et al. 2021, arXiv:2104.09864).

rotate_half is cat(-x[D/2:], x[:D/2]), or, for interleaved pairs, stack(-x[1::2], x[::2]) flattened. Inductor's code would copy the
halves, and compute cosine and sine of the angles again for every head of every layer.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.match import (
    CONVERSIONS,
    FLOATING,
    VIEWS,
    args_of,
    argument,
    axis,
    is_call,
    is_one,
    is_tensor,
    same_size,
    same_sizes,
    unconverted,
    value,
)
from hf_cpu_accel.compiler.rewriter import Rewriter, aten

ours = torch.ops.hf_cpu_accel


def fuse_rotary(rewriter: Rewriter) -> int:
    """Replace rotary positions written out by `rotary_embedding`. Return how many."""
    return sum(_fuse(rewriter, node) for node in rewriter.calls(aten.add.Tensor))


def _fuse(rewriter: Rewriter, node: Node) -> bool:
    if node.kwargs or not is_tensor(args_of(node)[1]) or value(node).dim() != 4:
        return False
    for straight, turned in (args_of(node), args_of(node)[::-1]):
        if not is_call(straight, aten.mul.Tensor) or not is_call(turned, aten.mul.Tensor):
            continue
        for heads, cos in (args_of(straight), args_of(straight)[::-1]):
            for half, sin in (args_of(turned), args_of(turned)[::-1]):
                interleaved = _turned(heads, half)
                if interleaved is not None:
                    return _replace(rewriter, node, unconverted(heads), cos, sin, interleaved)
    return False


def _replace(rewriter: Rewriter, node: Node, heads: Node, cos: Node, sin: Node, interleaved: bool) -> bool:
    """Replace `node`, which is [B, H, L, D] or [B, L, H, D]; the tables are [1 or B, L, D] with a 1 at the dimension of heads."""
    result = node
    following = next(iter(node.users), None)
    if (
        value(node).dtype is not value(heads).dtype
        and len(node.users) == 1
        and is_call(following, *CONVERSIONS)
    ):
        result = following  # computed in float32, and rounded at the end
    if value(heads).dtype not in FLOATING or value(result).dtype is not value(heads).dtype:
        return False
    if not same_sizes(value(heads).shape, value(node).shape) or value(heads).shape[3] % 2:
        return False
    if rewriter.is_written(heads, cos, sin):
        return False
    for dim in (1, 2):
        if _is_table(cos, heads, dim) and _is_table(sin, heads, dim):
            break
    else:
        return False
    heads = heads if dim == 2 else rewriter.call(result, aten.transpose.int, heads, 1, 2)
    cos, sin = (rewriter.call(result, aten.squeeze.dim, table, dim) for table in (cos, sin))
    rotated = rewriter.call(result, ours.rotary_embedding.default, heads, cos, sin, interleaved)
    rotated = rotated if dim == 2 else rewriter.call(result, aten.transpose.int, rotated, 1, 2)
    rewriter.replace(result, rotated)
    return True


def _is_table(table: object, heads: Node, dim: int) -> bool:
    """Return whether `table` has a number per position and feature, the same for all heads, which are dimension `dim`."""
    if not is_tensor(table) or value(table).dtype not in FLOATING or value(table).dim() != 4:
        return False
    shape, full = value(table).shape, value(heads).shape
    if not is_one(shape[dim]) or not same_sizes((shape[3 - dim], shape[3]), (full[3 - dim], full[3])):
        return False
    return is_one(shape[0]) or same_size(shape[0], full[0])


def _turned(heads: object, half: object) -> bool | None:
    """Return whether pairs are interleaved, if `half` is rotate_half of `heads`; None if it is not."""
    if not is_tensor(heads) or not is_tensor(half):
        return None
    x, turned = unconverted(heads), unconverted(half)
    if is_call(turned, aten.cat.default) and _last(turned, args_of(turned)[0]):
        parts = args_of(turned)[0]
        return False if len(parts) == 2 and _are_halves(parts, x) else None
    if is_call(turned, aten.flatten.using_ints, *VIEWS) and is_call(args_of(turned)[0], aten.stack.default):
        stack = args_of(turned)[0]
        parts = args_of(stack)[0]
        return True if len(parts) == 2 and _last(stack, [stack]) and _are_neighbors(parts, x) else None
    return None


def _last(node: Node, like: list[Node]) -> bool:
    """Return whether `node` concatenates along the last dimension of its result."""
    dims = value(like[0]).dim()
    return axis(argument(node, "dim"), dims) == dims - 1


def _are_halves(parts: list[Node], x: Node) -> bool:
    high, low = _negated(parts[0]), unconverted(parts[1])
    size = value(x).shape[-1]
    return high is not None and _is_slice(high, x, size // 2, size, 1) and _is_slice(low, x, 0, size // 2, 1)


def _are_neighbors(parts: list[Node], x: Node) -> bool:
    odd, even = _negated(parts[0]), unconverted(parts[1])
    if odd is None:
        return False
    size = value(x).shape[-1]
    if _is_slice(odd, x, 1, size, 2) and _is_slice(even, x, 0, size, 2):
        return True
    return _is_column(odd, x, 1) and _is_column(even, x, 0)


def _is_slice(node: Node, x: Node, start: int, end: int, step: int) -> bool:
    """Return whether `node` is x[..., start:end:step]."""
    if not is_call(node, aten.slice.Tensor):
        return False
    source, dim, first, last, stride = (
        argument(node, name) for name in ("self", "dim", "start", "end", "step")
    )
    if unconverted(source) is not x or axis(dim, value(x).dim()) != value(x).dim() - 1:
        return False
    last = end if last is None else last
    return (
        (first or 0, stride) == (start, step)
        and isinstance(last, int)
        and min(last, value(x).shape[-1]) == end
    )


def _is_column(node: Node, x: Node, index: int) -> bool:
    """Return whether `node` is x.unflatten(-1, (-1, 2))[..., index], by `unbind` or by `select`."""
    if is_call(node, operator.getitem):
        source, place = args_of(node)
        dim: Any = argument(source, "dim") if is_call(source, aten.unbind.int) else None
        pairs = args_of(source)[0] if dim is not None else None
    elif is_call(node, aten.select.int):
        pairs, dim, place = args_of(node)
    else:
        return False
    if (
        not is_call(pairs, *VIEWS, aten.unflatten.int)
        or place != index
        or unconverted(args_of(pairs)[0]) is not x
    ):
        return False
    dims = value(pairs).dim()
    return dims == value(x).dim() + 1 and axis(dim, dims) == dims - 1 and value(pairs).shape[-1] == 2


def _negated(node: Node) -> Node | None:
    node = unconverted(node)
    return unconverted(args_of(node)[0]) if is_call(node, aten.neg.default) else None
