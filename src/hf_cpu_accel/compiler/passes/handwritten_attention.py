"""Replacement of attention written out, softmax(query key^T * scale + mask) value, by `attention`.

The scale may be on the query, the key or the product, and the softmax in float32 or not.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from hf_cpu_accel.compiler.passes.attention import replace_by_attention
from hf_cpu_accel.compiler.passes.match import args_of, argument, axis, is_call, is_tensor, value
from hf_cpu_accel.compiler.rewriter import Rewriter, aten

_CONVERSIONS = (aten.to.dtype, aten._to_copy.default)


@dataclass(frozen=True)
class _Scores:
    query: Node
    key: Node
    mask: Node | None
    scale: float


def fuse_handwritten_attention(rewriter: Rewriter) -> int:
    """Replace attention written out by `attention`. Return how many."""
    count = 0
    for node in rewriter.calls(aten.matmul.default):
        probabilities, values = args_of(node)
        softmax = _unconverted(probabilities)
        if not is_call(softmax, aten.softmax.int) or len(softmax.users) != 1 or value(softmax).dim() != 4:
            continue
        if axis(argument(softmax, "dim"), 4) != 3:
            continue
        scores = _read_scores(rewriter, args_of(softmax)[0])
        if scores is None:
            continue
        count += replace_by_attention(
            rewriter,
            node,
            scores.query,
            scores.key,
            values,
            scores.mask,
            is_causal=False,
            scale=scores.scale,
        )
    return count


def _read_scores(rewriter: Rewriter, node: Node) -> _Scores | None:
    node, mask = _unconverted(node), None
    if is_call(node, aten.add.Tensor) and is_tensor(args_of(node)[1]) and not node.kwargs:
        node, mask = args_of(node)
    product, scale = _scaled(rewriter, _unconverted(node))
    if not is_call(product, aten.matmul.default) or len(product.users) != 1:
        return None
    (query, on_query), (turned, on_turned) = (_scaled(rewriter, part) for part in args_of(product))
    if not is_call(turned, aten.transpose.int) or {axis(d, 4) for d in args_of(turned)[1:3]} != {2, 3}:
        return None
    key, on_key = _scaled(rewriter, args_of(turned)[0])
    return _Scores(query, key, mask, scale * on_query * on_turned * on_key)


def _scaled(rewriter: Rewriter, node: Node) -> tuple[Node, float]:
    """Return (factor, number) for a product with a number, (node, 1) for anything else."""
    if is_call(node, aten.mul.Tensor, aten.div.Tensor):
        number = rewriter.number(args_of(node)[1])
        if number:
            return args_of(node)[0], number if node.target is aten.mul.Tensor else 1 / number
    return node, 1.0


def _unconverted(node: Node) -> Node:
    """Return the input of a conversion between floating dtypes, else `node` itself."""
    if is_call(node, *_CONVERSIONS) and value(node).is_floating_point():
        return args_of(node)[0]
    return node
