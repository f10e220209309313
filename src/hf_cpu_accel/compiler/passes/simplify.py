"""Removal of ops that change nothing: dropout in eval mode, conversions to the same dtype, full slices, views of the same shape,
pairs of transpositions, and arithmetic with 0 or 1. Each would hide from later passes that two ops belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from hf_cpu_accel.compiler.passes.match import VIEWS, args_of, argument, axis, is_call, same_sizes
from hf_cpu_accel.compiler.rewriter import Rewriter, aten

_CONVERSIONS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten._to_copy.default,
    aten.to.other,
    aten.type_as.default,
)
_VIEWS = (*VIEWS, aten.expand.default, aten.slice.Tensor)
_NEUTRAL = {aten.add.Tensor: 0, aten.mul.Tensor: 1, aten.div.Tensor: 1}
_NOTHING = (aten.dropout.default, aten.feature_dropout.default, aten.alias.default, aten.detach.default)


def remove_no_ops(rewriter: Rewriter) -> int:
    """Remove ops that change nothing. Return how many."""
    count = 0
    for node in rewriter.calls(
        *_CONVERSIONS,
        *_VIEWS,
        *_NOTHING,
        *_NEUTRAL,
        aten.cat.default,
        aten.transpose.int,
        aten.permute.default,
    ):
        source = _unchanged_input(node)
        if source is not None and not rewriter.is_written(node, source):
            rewriter.replace(node, source)
            count += 1
    return count


def _unchanged_input(node: Node) -> Node | None:
    """Return the argument that `node` returns unchanged, or None."""
    if node.target in (aten.dropout.default, aten.feature_dropout.default):
        return _node(args_of(node)[0]) if args_of(node)[2] is False else None
    if node.target is aten.cat.default:
        return _only_part(args_of(node)[0])
    input = _node(args_of(node)[0])
    if input is None:
        return None
    if node.target is aten.transpose.int:
        return _transposed_back(node, input)
    if node.target is aten.permute.default:
        return _permuted_back(node, input)
    if node.target in _NEUTRAL:
        return input if _is_neutral(node) and _is_alike(node, input, strides=True) else None
    if node.target in _CONVERSIONS:
        return input if _is_alike(node, input, strides=True) and not _copies(node) else None
    if is_call(node, *VIEWS) and is_call(input, *VIEWS):
        source = _node(args_of(input)[0])
        if source is not None and _is_alike(node, source, strides=True):
            return source
    if node.target in _VIEWS:
        return input if _is_alike(node, input, strides=False) else None
    return input


def _node(value: object) -> Node | None:
    return value if isinstance(value, Node) else None


def _is_alike(node: Node, input: Node, *, strides: bool) -> bool:
    """Return whether dtype and (symbolic) shape are equal, and strides if `strides`; views of the same shape keep the strides."""
    before, after = input.meta["val"], node.meta["val"]
    if not isinstance(before, Tensor) or before.dtype is not after.dtype:
        return False
    if strides and not same_sizes(before.stride(), after.stride()):
        return False
    return same_sizes(before.shape, after.shape)


def _is_neutral(node: Node) -> bool:
    """Return whether the second operand is the neutral element of the op."""
    target: Any = node.target
    other = args_of(node)[1]
    return isinstance(other, int | float) and other == _NEUTRAL[target]


def _copies(node: Node) -> bool:
    """Return whether a conversion must copy, or changes the order in memory."""
    if node.target is aten._to_copy.default:
        return True
    if node.target is aten.type_as.default:
        return False
    return argument(node, "copy") is True or argument(node, "memory_format") is not None


def _only_part(parts: Sequence[Node]) -> Node | None:
    """Return the only non-empty part of a concatenation with empty vectors, as in new caches; else None."""
    filled = [part for part in parts if tuple(part.meta["val"].shape) != (0,)]
    return filled[0] if len(filled) == 1 and filled[0].meta["val"].dim() > 1 else None


def _transposed_back(node: Node, input: Node) -> Node | None:
    if input.target is not aten.transpose.int:
        return None
    dims = node.meta["val"].dim()
    before, after = ({axis(d, dims) for d in args_of(n)[1:3]} for n in (input, node))
    return _node(args_of(input)[0]) if before == after else None


def _permuted_back(node: Node, input: Node) -> Node | None:
    if input.target is not aten.permute.default:
        return None
    dims = node.meta["val"].dim()
    first, second = ([axis(d, dims) for d in args_of(n)[1]] for n in (input, node))
    return _node(args_of(input)[0]) if [first[d] for d in second] == list(range(dims)) else None
