"""Fusion of the activation after a linear layer, an ATen op or written out, into the epilogue of the product."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.linear import LinearCall
from hf_cpu_accel.compiler.passes.match import args_of, argument, is_call
from hf_cpu_accel.compiler.rewriter import Rewriter, aten
from hf_cpu_accel.tolerance import SAME_NUMBER

ours = torch.ops.hf_cpu_accel
_NAMES = {
    aten.relu.default: "relu",
    aten.silu.default: "silu",
    aten.tanh.default: "tanh",
    aten.hardswish.default: "hardswish",
}
# The last op of an activation.
ACTIVATIONS = (
    *(aten.gelu.default, aten.relu.default, aten.silu.default, aten.tanh.default, aten.hardswish.default),
    aten.hardtanh.default,
    aten.mul.Tensor,
)


def fuse_activations(rewriter: Rewriter) -> int:
    """Move activations into the linear layer before them. Return how many."""
    count = 0
    for node in rewriter.calls(*ACTIVATIONS):
        found = read_activation(rewriter, node)
        if found is None or not is_call(found[0], ours.linear.default) or rewriter.is_written(found[0]):
            continue
        input, name, users = found
        call = LinearCall.of(input)
        if len(input.users) != users or call.activation != "none" or call.residual is not None:
            continue
        rewriter.replace(node, call.activated(rewriter, node, name))
        count += 1
    return count


def read_activation(rewriter: Rewriter, node: Node) -> tuple[Node, str, int] | None:
    """Return input, name and number of uses of the input of the activation that ends in `node`; None if it is not supported."""
    if node.target is aten.mul.Tensor:
        return _quick_gelu(rewriter, node) or _gelu_tanh(rewriter, node)
    target: Any = node.target
    name = _NAMES.get(target)
    if target is aten.gelu.default:
        name = "gelu_tanh" if argument(node, "approximate") == "tanh" else "gelu"
    elif target is aten.hardtanh.default:
        name = "relu6" if (argument(node, "min_val"), argument(node, "max_val")) == (0, 6) else None
    return None if name is None else (args_of(node)[0], name, 1)


def _quick_gelu(rewriter: Rewriter, node: Node) -> tuple[Node, str, int] | None:
    """x * sigmoid(1.702 x)"""
    for x, gate in (args_of(node), args_of(node)[::-1]):
        if is_call(gate, aten.sigmoid.default) and is_call(args_of(gate)[0], aten.mul.Tensor):
            inner = args_of(gate)[0]
            if isinstance(x, Node) and _with_number(rewriter, inner, aten.mul.Tensor, 1.702) is x:
                return x, "quick_gelu", 2
    return None


def _gelu_tanh(rewriter: Rewriter, node: Node) -> tuple[Node, str, int] | None:
    """0.5 x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))"""
    for half, rest in (args_of(node), args_of(node)[::-1]):
        x = _with_number(rewriter, half, aten.mul.Tensor, 0.5)
        curve = _with_number(rewriter, rest, aten.add.Tensor, 1.0)
        if x is None or not is_call(curve, aten.tanh.default):
            continue
        total = _with_number(rewriter, args_of(curve)[0], aten.mul.Tensor, math.sqrt(2 / math.pi))
        if not is_call(total, aten.add.Tensor) or args_of(total)[0] is not x:
            continue
        cube = _with_number(rewriter, args_of(total)[1], aten.mul.Tensor, 0.044715)
        if is_call(cube, aten.pow.Tensor_Scalar) and args_of(cube)[0] is x and args_of(cube)[1] == 3:
            return x, "gelu_tanh", 3
    return None


def _with_number(rewriter: Rewriter, node: object, target: object, number: float) -> Node | None:
    """Return the other argument of a commutative op on `number`."""
    if not is_call(node, target):
        return None
    for value, other in (args_of(node), args_of(node)[::-1]):
        found = rewriter.number(other)
        if isinstance(value, Node) and found is not None and math.isclose(found, number, rel_tol=SAME_NUMBER):
            return value
    return None
