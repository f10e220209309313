"""Constant folding: values that depend on parameters alone are computed once, before the calls.

Examples are weights in another form (8 bits and a scale, a direction and a norm, an offset from 1) and biases of attention gathered
from a table. The result is an input of the graph like a packed weight. So it is computed again when a parameter changes, and caches
of compiled graphs contain no values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hf_cpu_accel.compiler.passes.match import VIEWS, args_of, is_tensor
from hf_cpu_accel.compiler.rewriter import Rewriter, aten
from hf_cpu_accel.compiler.weight_transforms import Computed, Value

_NAMESPACES = ("aten", "prims", "quantized_decomposed")
# These cost nothing in a call, and may expand a small tensor to the size of the batch.
_FREE = (
    *VIEWS,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.default,
    aten.transpose.int,
    aten.permute.default,
    aten.t.default,
    aten.numpy_T.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.alias.default,
    aten.detach.default,
)
# The result may have this many bytes, or this many times the size of its sources.
_LARGEST, _GROWTH = 16 << 20, 4


def fold_constants(rewriter: Rewriter) -> int:
    """Compute what depends on parameters alone ahead of the calls. Return how many."""
    computed: set[Node] = set()
    for node in rewriter.graph.nodes:
        if _is_computable(rewriter, node) and all(
            rewriter.is_constant(n) or n in computed for n in node.all_input_nodes
        ):
            computed.add(node)
    count = 0
    for node in list(computed):
        if any(user not in computed for user in node.users):
            count += _fold(rewriter, node, computed)
    return count


def _is_computable(rewriter: Rewriter, node: Node) -> bool:
    """Return whether `node` is a deterministic op without side effects, and its sizes are numbers."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload):
        return False
    if (
        op.namespace not in _NAMESPACES
        or op._schema.is_mutable
        or torch.Tag.nondeterministic_seeded in op.tags
    ):
        return False
    if not is_tensor(node) or not _is_recordable((node.args, node.kwargs)):
        return False
    sizes = [node.meta["val"].shape, *(n.meta["val"].shape for n in node.all_input_nodes)]
    if any(isinstance(size, torch.SymInt) for shape in sizes for size in shape):
        return False
    return not rewriter.is_written(node, *node.all_input_nodes)


def _is_recordable(argument: Any) -> bool:
    """Return whether a recipe can record the argument: tensors, numbers, strings, dtypes, and sequences of those."""
    if isinstance(argument, list | tuple):
        return all(map(_is_recordable, argument))
    if isinstance(argument, dict):
        return all(map(_is_recordable, argument.values()))
    if isinstance(argument, Node):
        return isinstance(argument.meta.get("val"), Tensor)
    return argument is None or isinstance(argument, int | float | str | torch.dtype)


def _fold(rewriter: Rewriter, node: Node, computed: set[Node]) -> bool:
    """Replace `node`, or the base of its views, by an input of the graph."""
    while node in computed and node.target in _FREE:
        node = args_of(node)[0]
    if node not in computed or node._erased or any(map(_is_returned, node.users)):
        return False
    steps = list(_steps(node, computed))
    sources = list(dict.fromkeys(n for step in steps for n in step.all_input_nodes if n not in computed))
    value: Tensor = node.meta["val"]
    limit = max(_LARGEST, _GROWTH * sum(_bytes(source.meta["val"]) for source in sources))
    if not sources or _bytes(value) > limit:
        return False
    places = {n: Value(number) for number, n in enumerate([*sources, *steps])}

    def record(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return tuple(map(record, argument))
        return places[argument] if isinstance(argument, Node) else argument

    recorded = tuple(
        (str(step.target), record(step.args), tuple((k, record(v)) for k, v in step.kwargs.items()))
        for step in steps
    )
    recipe = Computed(recorded, tuple(int(size) for size in value.shape), value.dtype)
    (constant,) = rewriter.derived(recipe, sources)
    if value.stride() != constant.meta["val"].stride():
        return False  # views of it were captured for another layout
    rewriter.replace(node, constant)
    return True


def _is_returned(user: Node) -> bool:
    """Return whether the graph returns the value or a view of it, which the caller may write to."""
    return user.op == "output" or (user.target in _FREE and any(map(_is_returned, user.users)))


def _steps(node: Node, computed: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes that compute `node`, in order, `node` last."""
    seen: set[Node] = set()

    def visit(step: Node) -> Iterator[Node]:
        if step in seen or step not in computed:
            return
        seen.add(step)
        for before in step.all_input_nodes:
            yield from visit(before)
        yield step

    return visit(node)


def _bytes(value: Tensor) -> int:
    return math.prod(int(size) for size in value.shape) * value.dtype.itemsize
