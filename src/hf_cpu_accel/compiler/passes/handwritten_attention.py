"""Attention that is written out: softmax(query key^T * scale + mask) value, with the scale on the query, the key or the product, and
the softmax in float32 or not."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from hf_cpu_accel.compiler.passes.attention import fuse
from hf_cpu_accel.compiler.passes.reading import argument, axis, is_call, is_tensor, value
from hf_cpu_accel.compiler.rewriter import Rewriter, aten

_CONVERSIONS = (aten.to.dtype, aten._to_copy.default)


@dataclass(frozen=True)
class _Scores:
    query: Node
    key: Node
    mask: Node | None
    scale: float


def apply(rewriter: Rewriter) -> int:
    count = 0
    for node in rewriter.calls(aten.matmul.default):
        probabilities, values = node.args
        softmax = _unconverted(probabilities)  # type: ignore[arg-type]
        if not is_call(softmax, aten.softmax.int) or len(softmax.users) != 1 or value(softmax).dim() != 4:
            continue
        if axis(argument(softmax, "dim"), 4) != 3:
            continue
        scores = _read_scores(rewriter, softmax.args[0])  # type: ignore[arg-type]
        if scores is None:
            continue
        count += fuse(
            rewriter,
            node,
            scores.query,
            scores.key,
            values,  # type: ignore[arg-type]
            scores.mask,
            is_causal=False,
            scale=scores.scale,
        )
    return count


def _read_scores(rewriter: Rewriter, node: Node) -> _Scores | None:
    node, mask = _unconverted(node), None
    if is_call(node, aten.add.Tensor) and is_tensor(node.args[1]) and not node.kwargs:
        node, mask = node.args  # type: ignore[assignment]
    product, scale = _scaled(rewriter, _unconverted(node))
    if not is_call(product, aten.matmul.default) or len(product.users) != 1:
        return None
    (query, on_query), (turned, on_turned) = (_scaled(rewriter, part) for part in product.args)  # type: ignore[arg-type]
    if not is_call(turned, aten.transpose.int) or {axis(d, 4) for d in turned.args[1:3]} != {2, 3}:
        return None
    key, on_key = _scaled(rewriter, turned.args[0])  # type: ignore[arg-type]
    return _Scores(query, key, mask, scale * on_query * on_turned * on_key)


def _scaled(rewriter: Rewriter, node: Node) -> tuple[Node, float]:
    """What `node` is times a number, and that number: (node, 1) for anything else."""
    if is_call(node, aten.mul.Tensor, aten.div.Tensor):
        number = rewriter.number(node.args[1])
        if number:
            return node.args[0], number if node.target is aten.mul.Tensor else 1 / number  # type: ignore[return-value]
    return node, 1.0


def _unconverted(node: Node) -> Node:
    """What `node` converts to another floating dtype for itself alone, or `node`."""
    if is_call(node, *_CONVERSIONS) and value(node).is_floating_point():
        return node.args[0]  # type: ignore[return-value]
    return node
