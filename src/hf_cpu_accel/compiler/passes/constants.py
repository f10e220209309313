"""What a model computes from its parameters alone, in every call: once, ahead of the calls.

Weights that are stored in another form (8 bits and a scale, a direction and a length, what they differ from 1), biases of
attention that are gathered from a table. What is made is an input of the graph like a packed weight, so a parameter that changes
is computed with anew, and no cache of compiled graphs holds values.
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
# They cost nothing in a call, and may make something small as large as the batch.
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
# What is computed may be this many bytes, or this many times what it is computed from.
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
    """An op without side effects and chance, whose sizes are numbers."""
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
    """Whether a recipe can hold it: tensors, numbers, names and dtypes, and rows of those."""
    if isinstance(argument, list | tuple):
        return all(map(_is_recordable, argument))
    if isinstance(argument, dict):
        return all(map(_is_recordable, argument.values()))
    if isinstance(argument, Node):
        return isinstance(argument.meta.get("val"), Tensor)
    return argument is None or isinstance(argument, int | float | str | torch.dtype)


def _fold(rewriter: Rewriter, node: Node, computed: set[Node]) -> bool:
    """Put an input in the place of `node`, or of what it is a view of."""
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

    def given(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return tuple(map(given, argument))
        return places[argument] if isinstance(argument, Node) else argument

    written = tuple(
        (str(step.target), given(step.args), tuple((k, given(v)) for k, v in step.kwargs.items()))
        for step in steps
    )
    recipe = Computed(written, tuple(int(size) for size in value.shape), value.dtype)
    (made,) = rewriter.derived(recipe, sources)
    if value.stride() != made.meta["val"].stride():
        return False  # views of it were captured for another layout
    rewriter.replace(node, made)
    return True


def _is_returned(user: Node) -> bool:
    """Whether the graph returns it, or a view: whoever gets it may write to it."""
    return user.op == "output" or (user.target in _FREE and any(map(_is_returned, user.users)))


def _steps(node: Node, computed: Iterable[Node]) -> Iterator[Node]:
    """What `node` is computed by, in order, itself last."""
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
