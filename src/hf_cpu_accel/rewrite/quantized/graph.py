"""Graphs of the PT2E flow, whose products of dequantized values become linears and convolutions that the rules can match.

The graph stays unchanged, with its state dict. Its forward runs another graph over the same parameters, in which each product is
a module with its name before the export, and without pairs of ops that round activations and dequantize them: products of this
package choose the step for each row, which is finer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from hf_cpu_accel.checkpoints.exported import WidenedLinear, is_quantized_graph, is_rounding
from hf_cpu_accel.patching.override import Override
from hf_cpu_accel.patching.restore import add_attribute
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.left_alone import has_weights

_ATEN = torch.ops.aten
# The name of the bounds to which the graph clamps rounded values.
RANGE = "range"
_PRODUCTS = (_ATEN.linear.default, _ATEN.conv2d.default)


@dataclass(frozen=True)
class Widening:
    """A computation of tensors of the module alone; calling it returns the value.

    Attributes:
        op: the function of the node.
        args, kwargs: its arguments, with tensors or further computations in place of nodes.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Tensor:
        args, kwargs = map_aggregate((self.args, self.kwargs), _computed)
        with torch.no_grad():
            value: Tensor = self.op(*args, **kwargs)
        return value


def _computed(argument: Any) -> Any:
    return argument() if isinstance(argument, Widening) else argument


class LoweredForward(Override):
    """Runs another graph in place of a quantized one."""

    name = "forward"

    def __init__(self, model: nn.Module, lowered: GraphModule) -> None:
        super().__init__(model)
        self.lowered = lowered

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.lowered.forward(*args, **kwargs)


def lower_quantized_graphs(context: Context) -> Iterable[PlanItem]:
    """Add the products of quantized graphs to the modules for the rules."""
    for path, module in list(context.tree.modules):
        if is_quantized_graph(module) and not context.skipped(path):
            yield from _lower(path, module, context)


def with_lowered(module: nn.Module) -> nn.Module:
    """Return the module that runs in place of `module`."""
    forward = vars(module).get("forward")
    return forward.lowered if isinstance(forward, LoweredForward) else module


def _lower(path: str, module: GraphModule, context: Context) -> Iterator[PlanItem]:
    graph = copy.deepcopy(module.graph)
    products = _products(module, graph)
    if not products:
        yield PlanItem.left(path, "quantized graph", "it has no supported product with dequantized weights")
        return
    rounded = {node.target for node in graph.nodes if node.target in products and _unrounded(node.args[0])}
    _drop_rounding(graph)
    graph.eliminate_dead_code(is_impure_node=lambda node: not _is_idle(node))
    held = {
        str(node.target): attrgetter(str(node.target))(module)
        for node in graph.nodes
        if node.op in ("get_attr", "call_module") and node.target not in products
    }
    lowered = GraphModule(held | products, graph)
    lowered.eval()
    add_attribute(context.journal, module, "forward", LoweredForward(module, lowered))
    _offer(path, module, lowered, products, context)
    convolutions = [name for name in rounded if isinstance(products[str(name)], nn.Conv2d)]
    if context.config.dtype == "auto":
        paths = (_joined(path, str(name)) for name in convolutions)
        context.dtypes.choose((at, "int8") for at in paths if not context.dtypes.own(at))


def _offer(
    path: str, module: GraphModule, lowered: GraphModule, products: dict[str, nn.Module], context: Context
) -> None:
    """Offer the modules that are called now to the rules, instead of those that hold the parameters of the graph under their old
    names."""
    containers = {id(child) for child in module.modules() if type(child) is nn.Module}
    context.tree.modules[:] = [pair for pair in context.tree.modules if id(pair[1]) not in containers]
    for name, child in lowered.named_modules():
        parent, _, last = name.rpartition(".")
        if name:
            context.tree.slots[id(child)].append((lowered.get_submodule(parent), last))
        if name in products or not has_weights(child):
            context.tree.modules.append((_joined(path, name), child))
        if isinstance(child, nn.Conv2d):
            context.weights.created.add(id(child.weight))


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _products(module: GraphModule, graph: Graph) -> dict[str, nn.Module]:
    """Return the modules of products, by path; the graph calls them."""
    made: dict[str, nn.Module] = {}
    path_of_product: dict[tuple[Any, ...], str] = {}
    for node in list(graph.nodes):
        if node.target not in _PRODUCTS or node.kwargs:
            continue
        input, weight, bias, *geometry = (*node.args, None)[: max(3, len(node.args))]
        widen, given = _widening(weight, module), _constant(bias, module)
        if widen is None or (bias is not None and given is None):
            continue
        product = node.target, *node.args[1:]  # all that it does to an input
        path = path_of_product.get(product)
        if path is None:
            path = path_of_product[product] = _path_of(node, made)
            made[path] = _module_of(node, widen, given, geometry)
        with graph.inserting_before(node):
            call = graph.call_module(path, (input,))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    return made


def _module_of(node: Node, widen: Widening, bias: Tensor | None, geometry: list[Any]) -> nn.Module:
    given = bias if isinstance(bias, nn.Parameter | None) else nn.Parameter(bias, requires_grad=False)
    if node.target is _ATEN.linear.default:
        return WidenedLinear(widen, given, rounds=_unrounded(node.args[0]) is not None)
    values = widen()
    defaults = ([1, 1], [0, 0], [1, 1], 1)
    numbers: list[Any] = [*geometry, *defaults[len(geometry) :]]
    stride, padding, dilation, groups = numbers
    out_channels, in_channels, *sizes = values.shape
    convolution = nn.Conv2d(
        in_channels * groups,
        out_channels,
        _pair(sizes),
        stride=_pair(stride),
        padding=_pair(padding),
        dilation=_pair(dilation),
        groups=groups,
        bias=False,
        device="meta",
    )
    convolution.weight = nn.Parameter(values, requires_grad=False)
    convolution.register_parameter("bias", given)
    return convolution


def _path_of(node: Node, made: dict[str, nn.Module]) -> str:
    """Return the path of the module that the product belonged to; a name that is not used yet."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = stack[-1][0] if stack else node.name
    while path in made or not path:
        path = f"{path or node.name}_again"
    return path


def _drop_rounding(graph: Graph) -> None:
    for node in graph.nodes:
        whole = _unrounded(node)
        if whole is not None:
            step, zero, least, most = node.args[1:5]
            if isinstance(step, float):
                whole.meta[RANGE] = (least - zero) * step, (most - zero) * step
            node.replace_all_uses_with(whole)


def _is_idle(node: Node) -> bool:
    """Return whether a node has no effect besides its value, so that it can be removed without readers."""
    return node.op == "get_attr" or node.target is getitem or is_rounding(node.target)


def _unrounded(node: object) -> Node | None:
    """Return the node before a pair that rounds and dequantizes by the same step, or None."""
    if not isinstance(node, Node) or not is_rounding(node.target, "dequantize_per_t"):
        return None
    rounded = node.args[0]
    if not isinstance(rounded, Node) or not is_rounding(rounded.target, "quantize_per_t"):
        return None
    whole = rounded.args[0]
    same = rounded.args[1:] == node.args[1:] and not rounded.kwargs and not node.kwargs
    return whole if same and isinstance(whole, Node) else None


def _widening(node: object, module: GraphModule) -> Widening | None:
    """Return the computation that dequantizes a weight, or None if there is none or it depends on inputs of the graph."""
    if not isinstance(node, Node):
        return None
    found = _expression(node, module)
    return found if isinstance(found, Widening) and _widens(node) else None


def _widens(node: Node) -> bool:
    return is_rounding(node.target, "dequantize_per") or any(map(_widens, node.all_input_nodes))


def _expression(node: Node, module: GraphModule) -> Widening | Tensor | None:
    if node.op == "get_attr":
        return _constant(node, module)
    if node.op != "call_function":
        return None
    values: dict[Node, Any] = {}
    for other in node.all_input_nodes:
        values[other] = _expression(other, module)
        if values[other] is None:
            return None
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    return Widening(node.target, args, kwargs)


def _constant(node: object, module: GraphModule) -> Tensor | None:
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = attrgetter(str(node.target))(module)
    return value if isinstance(value, Tensor) else None


def _pair(numbers: list[int]) -> tuple[int, int]:
    first, *others = numbers
    return first, others[0] if others else first
