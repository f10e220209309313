"""Consecutive convolutions of a PT2E graph in one call: the graph has a range for each image, so that images pass as int8, as
with `dtype="int8-static"`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from hf_cpu_accel.check import row_error
from hf_cpu_accel.ops.chain.joined import Steps, join
from hf_cpu_accel.ops.chain.steps import ConvolutionStep, PoolingStep
from hf_cpu_accel.ops.convolution_chain import BoundConvolutions, bind, convolutions
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.convolution.deferred import DeferringConvolution
from hf_cpu_accel.rewrite.convolution.links import Link
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.quantized.graph import RANGE, with_lowered
from hf_cpu_accel.tolerance import RESIDUAL_BLOCKS

STRUCTURE = "int8 images"
_ATEN = torch.ops.aten
_RELU = (_ATEN.relu.default, _ATEN.relu_.default)
_ADD = (_ATEN.add.Tensor, _ATEN.add_.Tensor)
_IN_PLACE = (_ATEN.add_.Tensor,)
_POOLING = (_ATEN.max_pool2d.default,)


@dataclass(eq=False)
class _Made:
    """The output of a convolution or a pooling.

    Attributes:
        nodes: its nodes: a convolution, a sum and an activation, or a pooling.
        source: None for the input image.
        adds: whether another image may be added; depthwise convolutions add none.
    """

    nodes: list[Node]
    source: _Made | None
    step: Callable[[int], ConvolutionStep | PoolingStep]
    convolves: bool
    residual: _Made | None = None
    activation: str = "none"
    adds: bool = True

    @property
    def node(self) -> Node:
        """Return the node that returns it."""
        return self.nodes[-1]

    @property
    def range(self) -> tuple[float, float] | None:
        return self.node.meta.get(RANGE)

    @property
    def is_open(self) -> bool:
        """Return whether a sum or an activation may join it."""
        return (
            self.convolves and self.activation == "none" and self.range is None and len(self.node.users) == 1
        )


class JoinedConvolutions(nn.Module):
    """[N, C, H, W] -> [N, C', H', W'], channels last: the computation of the nodes between the two.

    Args:
        steps: returns the steps with current weights.
    """

    def __init__(self, steps: Callable[[], Steps]) -> None:
        super().__init__()
        self._steps = steps
        self._bound: BoundConvolutions | None = None

    def forward(self, image: Tensor) -> Tensor:
        if self._bound is None:
            self._bound = bind(self._steps(), narrow=True)
        return convolutions(image, self._bound)


def join_quantized_images(context: Context) -> Iterable[PlanItem]:
    """Join consecutive convolutions of quantized graphs. Call it after they are packed."""
    for path, module in context.root.named_modules():
        lowered = with_lowered(module)
        if lowered is not module and isinstance(lowered, GraphModule):
            yield from _join(path, lowered, context)


def _join(path: str, lowered: GraphModule, context: Context) -> Iterable[PlanItem]:
    for node in list(lowered.graph.nodes):
        if not _is_convolution(node, lowered):
            continue
        made = _read(node, lowered)
        last = _last(made)
        if last is None:
            continue
        order = _in_order(last)
        reason = _disagreement(order, node.args[0], lowered) if context.verifies else None
        if reason is not None:
            context.refuse(path, STRUCTURE, Refusal(reason))
            return
        _put_in_place(order, node.args[0], lowered)
        yield PlanItem(f"{path}.{node.target}".strip("."), STRUCTURE, "convolutions", "int8-static", 0, None)
        return


def _read(first: Node, lowered: GraphModule) -> dict[Node, _Made]:
    """Return the images computed from the input of `first`, by the nodes that return them."""
    input: Any = first.args[0]
    made: dict[Node, _Made] = {}
    for node in first.graph.nodes:
        source = node.args[0] if node.args else None
        if _is_convolution(node, lowered) and (source is input or source in made):
            step = _convolution(lowered, str(node.target))
            made[node] = _Made([node], made.get(source), step, True, adds=not step(0).is_grouped)
        elif node.target in _RELU and source in made and made[source].is_open:
            _join_in(made, node, made[source]).activation = "relu"
        elif node.target in _POOLING and source in made and (pooling := _pooling(node)) is not None:
            made[node] = _Made([node], made[source], pooling, False)
        elif node.target in _ADD and not node.kwargs and all(term in made for term in node.args):
            _add(made, node)
    return made


def _add(made: dict[Node, _Made], node: Node) -> None:
    """Make a convolution add the other image, which is then computed before it."""
    first, second = (made[term] for term in node.args)  # type: ignore[index]
    if first is second or (node.target in _IN_PLACE and len(first.node.users) > 1):
        return
    for image, residual in ((first, second), (second, first)):
        if image.is_open and image.adds and image.residual is None:
            _join_in(made, node, image).residual = residual
            return


def _join_in(made: dict[Node, _Made], node: Node, image: _Made) -> _Made:
    made[node] = made.pop(image.node)
    image.nodes.append(node)
    return image


def _last(made: dict[Node, _Made]) -> _Made | None:
    """Return the image that other nodes read, if it is the only one and depends on all, or None."""
    inside = {node for image in made.values() for node in image.nodes}
    read = [image for image in made.values() if not inside.issuperset(image.node.users)]
    return read[0] if len(read) == 1 and len(_in_order(read[0])) == len(made) > 1 else None


def _in_order(last: _Made) -> list[_Made]:
    """Return all images that it depends on, each after its own sources."""
    order: list[_Made] = []

    def add(image: _Made | None) -> None:
        if image is not None and image not in order:
            add(image.residual)
            add(image.source)
            order.append(image)

    add(last)
    return order


def _steps(order: Sequence[_Made], *, ranged: bool) -> Steps:
    number = {id(image): place for place, image in enumerate(order, start=1)}
    steps: Steps = []
    for image in order:
        step = image.step(0 if image.source is None else number[id(image.source)])
        if isinstance(step, ConvolutionStep):
            residual = None if image.residual is None else number[id(image.residual)]
            step = replace(
                step, residual=residual, activation=image.activation, range=image.range if ranged else None
            )
        steps.append(step)
    return join([steps])  # an image that cannot be int8 is not


def _is_convolution(node: Node, lowered: GraphModule) -> bool:
    if node.op != "call_module":
        return False
    module = lowered.get_submodule(str(node.target))
    return isinstance(module, DeferringConvolution) and module.own_weight(normalized=False) is not None


def _convolution(lowered: GraphModule, path: str) -> Callable[[int], ConvolutionStep]:
    return lambda source: Link(path, source, None, normalized=False, activation="none").step(lowered)


def _pooling(node: Node) -> Callable[[int], PoolingStep] | None:
    """Return a function that creates the step, or None if the op does not support it."""
    given: list[Any] = list(node.args)
    defaults: list[Any] = [None, given[1], [0, 0], [1, 1], False]
    _, size, stride, padding, dilation, ceil_mode = [*given, *defaults[len(given) - 1 :]]
    if set(dilation) != {1} or ceil_mode or node.kwargs:
        return None
    size, stride, padding = ((sides[0], sides[-1]) for sides in (size, stride or size, padding))
    channels = int(node.meta["val"].shape[1])
    return lambda source: PoolingStep(source, channels, size, stride, padding)


def _disagreement(order: Sequence[_Made], input: Any, lowered: GraphModule) -> str | None:
    """Return the difference from the nodes for an image of the exported size, without ranges, or None."""
    shown = input.meta["val"]
    image = torch.randn(
        tuple(map(int, shown.shape)), generator=torch.Generator().manual_seed(0), dtype=shown.dtype
    )
    with torch.inference_mode():
        ours = convolutions(image, bind(_steps(order, ranged=False), narrow=False))
        values: dict[Node, Any] = {input: image}
        for node in lowered.graph.nodes:
            if order[-1].node in values:
                break
            if node.args and node.args[0] in values and node.op in ("call_module", "call_function"):
                values[node] = _call(node, values, lowered)
    error, bound = row_error(ours, values[order[-1].node], dim=1), RESIDUAL_BLOCKS.of("int8")
    return None if error <= bound else f"the joined convolutions differ by {error:.1e} (allowed {bound:.0e})"


def _call(node: Node, values: dict[Node, Any], lowered: GraphModule) -> Any:
    args = torch.fx.node.map_arg(node.args, values.__getitem__)
    target: Any = lowered.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    return target(*args, **node.kwargs)


def _put_in_place(order: Sequence[_Made], input: Any, lowered: GraphModule) -> None:
    last, name = order[-1].node, "joined_convolutions"
    lowered.add_module(name, JoinedConvolutions(lambda: _steps(order, ranged=True)))
    with lowered.graph.inserting_after(last):
        call = lowered.graph.call_module(name, (input,))
    last.replace_all_uses_with(call)
    lowered.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    lowered.recompile()
