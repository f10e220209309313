"""Dynamo's graph in ATen ops.

Dynamo records calls of functions, methods and operators, with several spellings for each. A trace on fake tensors converts them to
a few hundred ops with positional arguments, without decompositions. The passes read this graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from hf_cpu_accel.compiler import torch_private


class NotCaptured(Exception):
    """The passes cannot read the graph; the message says why."""


@dataclass(frozen=True)
class Captured:
    """Attributes:
    graph_module: ATen ops, inputs in Dynamo's order.
    inputs: fake tensors and symbolic integers, one per input.
    parameters: positions of the inputs that are the same in every call: parameters, and buffers of modules.
    scalars: {position of an input: its symbolic float}. With dynamic sizes, Dynamo passes floats of modules as tensors without
        dimensions. `float()` of the symbol returns the value and guards it.
    """

    graph_module: GraphModule
    inputs: list[Any]
    parameters: frozenset[int]
    scalars: dict[int, Any]


def capture(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """Trace Dynamo's graph to ATen ops.

    Args:
        graph_module: the graph from Dynamo.
        example_inputs: its inputs, real tensors.

    Raises:
        NotCaptured: gradients are needed, or the graph contains a call that passes cannot read.
    """
    _check(graph_module, example_inputs)
    fakes = torch_private.fake_inputs(example_inputs)
    with torch_private.tracing(torch_private.fake_mode()):
        aten = torch_private.trace_aten(graph_module, fakes)
    for node, fake in zip(aten.graph.find_nodes(op="placeholder"), fakes, strict=True):
        node.meta["val"] = fake  # the original: the trace stores copies, which lose their symbolic float
    scalars = _scalars(graph_module)
    _settle(aten, {p: scalar for p, scalar in scalars.items() if torch_private.is_of_module(scalar)})
    return Captured(aten, fakes, _parameters(graph_module, example_inputs), scalars)


def _check(graph_module: GraphModule, example_inputs: Sequence[Any]) -> None:
    tensors = [input for input in example_inputs if isinstance(input, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise NotCaptured("gradients are needed")
    if torch.is_autocast_enabled("cpu"):
        raise NotCaptured("autocast is on, which chooses dtypes per call")
    if not all(torch_private.is_plain_tensor(tensor) for tensor in tensors):
        raise NotCaptured("an input is not a plain CPU tensor")
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(graph_module, str(node.target), None), Tensor):
            raise NotCaptured(
                "its weights are constants, for example because torch._inductor.config.freezing is on"
            )
        if node.op == "call_function" and torch_private.is_higher_order(node.target):
            raise NotCaptured(f"it calls {node.target}, which takes graphs as arguments")
        if node.op == "call_function" and torch_private.is_transform(node.target):
            raise NotCaptured(f"it calls a function transformed by torch.func ({node.target.__name__})")
        if node.op == "call_function" and getattr(node.target, "__name__", "") in _MODE_SWITCHES:
            raise NotCaptured(f"it changes the autograd or autocast mode ({node.target.__name__})")


_MODE_SWITCHES = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode")


def _parameters(graph_module: GraphModule, example_inputs: Sequence[Any]) -> frozenset[int]:
    inputs = zip(graph_module.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    return frozenset(
        position
        for position, (node, example) in enumerate(inputs)
        if isinstance(example, torch.nn.Parameter) or torch_private.is_static_input(node)
    )


def _settle(graph_module: GraphModule, scalars: dict[int, Any]) -> None:
    """Replace the floats at these inputs by numbers, and guard them.

    The floats of a model (the eps of a norm, the scale of rotary positions) are the same in every call. As inputs, passes could not
    read them, and Inductor would make Dynamo trace the model again for each float that cannot be a tensor.
    """
    inputs = list(graph_module.graph.find_nodes(op="placeholder"))
    for position, scalar in scalars.items():
        for item in list(inputs[position].users):
            if item.target is torch.ops.aten.item.default:
                _replace_by_number(item, float(scalar))
                graph_module.graph.erase_node(item)


def _replace_by_number(node: Node, number: float) -> None:
    def replace(arguments: Any) -> Any:
        return torch.fx.map_arg(arguments, lambda used: number if used is node else used)

    for user in list(node.users):
        user.args, user.kwargs = replace(user.args), replace(user.kwargs)


def _scalars(graph_module: GraphModule) -> dict[int, Any]:
    scalars = {}
    for position, node in enumerate(graph_module.graph.find_nodes(op="placeholder")):
        for user in node.users:
            value = user.meta.get("example_value")
            if user.op == "call_method" and user.target == "item" and isinstance(value, torch.SymFloat):
                scalars[position] = value
    return scalars
