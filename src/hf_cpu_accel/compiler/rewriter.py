"""`Rewriter`: the interface of passes to read and change a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, Node

from hf_cpu_accel.compiler import torch_private
from hf_cpu_accel.compiler.bind import Request
from hf_cpu_accel.compiler.capture import Captured
from hf_cpu_accel.compiler.weight_transforms import Composed, Part, Recipe
from hf_cpu_accel.ops.registry import positional

aten = torch.ops.aten
Target = Callable[..., Any]
_ARITHMETIC = (
    operator.mul,
    operator.truediv,
    operator.pow,
    operator.add,
    operator.sub,
    operator.neg,
    torch_private.sym_sqrt,
)


class Rewriter:
    """A captured graph that passes rewrite.

    Attributes:
        graph: the graph. Every node has its fake tensor (or symbolic number) in `meta["val"]`.
        dtype: the dtype of packed weights, one of `packing.DTYPES`, or None for the dtype of each weight.
    """

    def __init__(self, captured: Captured, dtype: str | None = None) -> None:
        self.graph: Graph = captured.graph_module.graph
        self.dtype = dtype
        self._mode = torch_private.fake_mode()
        self._inputs = list(self.graph.find_nodes(op="placeholder"))
        self._positions = {node: position for position, node in enumerate(self._inputs)}
        self._parameters = captured.parameters
        self._scalars = captured.scalars
        # {(recipe, sources): inputs for its tensors}, and the inverse.
        self._derived: dict[tuple[Recipe, tuple[Node, ...]], list[Node]] = {}
        self._origins: dict[Node, tuple[Recipe, tuple[Node, ...], int]] = {}
        self._writers = [node for node in self.graph.nodes if any(_writes(node))]

    # Reading.

    def calls(self, *targets: Target) -> Iterator[Node]:
        """Yield the nodes that call one of `targets`, in order; the graph may change during the iteration."""
        for node in list(self.graph.nodes):
            if node.op == "call_function" and node.target in targets and not node._erased:
                yield node

    def is_constant(self, value: object) -> TypeGuard[Node]:
        """Return whether `value` is an input that is the same in every call: a parameter, a buffer, or derived from those."""
        return isinstance(value, Node) and (
            self._positions.get(value) in self._parameters or value in self._origins
        )

    def number(self, value: object) -> float | None:
        """Return the value of an argument that is a number, else None. Guards floats that Dynamo passes as inputs."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, Node) or value.op != "call_function":
            return None
        if value.target is aten.item.default:
            scalar = self._scalars.get(self._positions.get(value.args[0], -1))
            return None if scalar is None else float(scalar)
        if value.target not in _ARITHMETIC or value.kwargs:
            return None
        numbers = [self.number(argument) for argument in value.args]
        compute: Any = value.target
        return None if None in numbers else float(compute(*numbers))

    def is_written(self, *nodes: Node) -> bool:
        """Return whether an op of the graph writes in place to the memory of one of the nodes."""
        return any(self._writers_of(node) for node in nodes)

    def is_written_before(self, end: Node, *nodes: Node) -> bool:
        """Return whether an op between one of the nodes and `end` writes in place to its memory."""
        return any(op in self._writers_of(node) for node in nodes for op in _between(node, end))

    def times_written(self, node: Node) -> int:
        """Return how many ops of the graph write in place to the memory of `node`."""
        return sum(len([s for s in _writes(op) if s == _storage(node)]) for op in self._writers_of(node))

    def _writers_of(self, node: Node) -> list[Node]:
        storage = _storage(node)
        return [op for op in self._writers if not op._erased and storage in _writes(op)]

    # Writing.

    def call(self, before: Node, target: Target, /, *args: Any, **named: Any) -> Node:
        """Insert a call of `target` before the node `before`, and compute its fake tensor.

        Args:
            args: arguments by position.
            named: the arguments after them by name in the op's schema; `ops.registry.positional` converts them.
        """
        if named:
            args = (*args, *positional(target, named, len(args)))
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)
        with torch_private.tracing(self._mode):
            node.meta["val"] = target(*torch.fx.map_arg(args, value_of))
        return node

    def changed(self, before: Node, node: Node, /, **named: Any) -> Node:
        """Insert a copy of the call `node` before `before`, with other values for the named arguments."""
        target: Any = node.target
        names = [argument.name for argument in target._schema.arguments]
        return self.call(before, target, **dict(zip(names, node.args, strict=False)) | node.kwargs | named)

    def replace(self, old: Node, new: Node) -> None:
        """Replace `old` by `new` in all its users. Nodes that only `old` used are removed at the end of the pass."""
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)

    def derived(self, recipe: Recipe, sources: Sequence[Node]) -> list[Node]:
        """Return new inputs of the graph for the tensors that `recipe` computes from the constants `sources` before the calls."""
        key = (recipe, tuple(sources))
        if key not in self._derived:
            last = next(reversed(self.graph.find_nodes(op="placeholder")))
            shapes = recipe.shapes(*(source.meta["val"] for source in sources))
            self._derived[key] = []
            for number, (shape, dtype) in enumerate(shapes):
                with self.graph.inserting_after(last):
                    last = self.graph.placeholder(f"derived_{len(self._derived)}_{number}")
                with self._mode:
                    last.meta["val"] = torch.empty(shape, dtype=dtype)
                self._derived[key].append(last)
                self._origins[last] = (*key, number)
        return self._derived[key]

    def refresh(self) -> None:
        """Recompute all fake tensors, after a pass that changed the layout of values."""
        with torch_private.tracing(self._mode):
            for node in self.graph.nodes:
                if node.op == "call_function" and isinstance(node.meta["val"], Tensor | tuple | list):
                    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of)
                    node.meta["val"] = node.target(*args, **kwargs)

    def clean(self) -> None:
        """Remove unused nodes, except inputs."""
        self.graph.eliminate_dead_code()

    def sources_of(self, derived: Node) -> tuple[Recipe, tuple[Node, ...]] | None:
        """Return the recipe and sources of a derived input; None for any other node."""
        origin = self._origins.get(derived)
        return None if origin is None else origin[:2]

    def finish(self) -> tuple[list[int], list[Request]]:
        """Remove unused inputs.

        Returns:
            The positions of the remaining inputs of Dynamo, and the requests of the derived inputs after them.
        """
        self.clean()
        kept = [position for position, node in enumerate(self._inputs) if node.users]
        requests = []
        for (recipe, sources), nodes in self._derived.items():
            places = tuple(place for place, node in enumerate(nodes) if node.users)
            if places:
                recipe, positions = self._from_inputs(recipe, sources)
                requests.append(
                    Request(recipe if len(places) == len(nodes) else Part(recipe, places), positions)
                )
        for node in [*self._inputs, *self._origins]:
            if not node.users:
                self.graph.erase_node(node)
        self.graph.lint()
        return kept, requests

    def _from_inputs(self, recipe: Recipe, sources: Sequence[Node]) -> tuple[Recipe, tuple[int, ...]]:
        """Return the recipe in terms of positions of Dynamo's inputs, composed if some sources are derived themselves."""
        inner: list[tuple[Recipe, int] | None] = []
        positions: list[int] = []
        for source in sources:
            if source in self._positions:
                inner.append(None)
                positions.append(self._positions[source])
                continue
            inner_recipe, inner_sources, place = self._origins[source]
            inner_recipe, inner_positions = self._from_inputs(inner_recipe, inner_sources)
            inner.append((Part(inner_recipe, (place,)), len(inner_positions)))
            positions += inner_positions
        return recipe if not any(inner) else Composed(recipe, tuple(inner)), tuple(positions)


def value_of(node: Node) -> Any:
    """Return the fake tensor or symbolic number of a node."""
    return node.meta["val"]


def _storage(node: Node) -> int | None:
    """Return the storage of the node's value, or None."""
    value = node.meta.get("val")
    return torch_private.storage_of(value) if isinstance(value, Tensor) else None


def _writes(node: Node) -> Iterator[int | None]:
    """Yield the storages that `node` writes to in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Node):
            yield _storage(value)


def _between(first: Node, last: Node) -> Iterator[Node]:
    node = first.next
    while node is not last and node.op != "root":
        yield node
        node = node.next
