"""Replacement of linear layers whose weight is a parameter by `linear` on the packed weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.match import FLOATING, VIEWS, args_of, axis, is_call, same_size, value
from hf_cpu_accel.compiler.passes.quantized import PACKED_AS
from hf_cpu_accel.compiler.rewriter import Rewriter, aten
from hf_cpu_accel.compiler.weight_transforms import JoinedBiases, PackedLinears
from hf_cpu_accel.packing.linear import dtype_of

ours = torch.ops.hf_cpu_accel
_PRODUCTS = (aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default)
# Fewer output features are mostly padding of a panel.
MIN_OUT_FEATURES = 16


@dataclass(frozen=True)
class LinearCall:
    """A call of `torch.ops.hf_cpu_accel.linear` in the graph, with its arguments by name."""

    node: Node
    input: Node
    weight: Node
    scale: Node | None
    bias: Node | None
    residual: Node | None
    out_features: int
    activation: str

    @classmethod
    def of(cls, node: Node) -> LinearCall:
        return cls(node, *args_of(node))

    @property
    def is_product_only(self) -> bool:
        """Return whether the call has neither an activation nor a residual."""
        return self.residual is None and self.activation == "none"

    @property
    def dtype(self) -> str:
        """The dtype of the packed weight."""
        return dtype_of(self.weight.meta["val"])

    def as_last(self) -> dict[str, Any]:
        """Return the arguments of `ffn` and `gated_ffn` for this call as the last linear layer."""
        return {
            "down": self.weight,
            "down_scale": self.scale,
            "down_bias": self.bias,
            "residual": self.residual,
            "out_features": self.out_features,
        }

    def activated(self, rewriter: Rewriter, before: Node, activation: str) -> Node:
        """Insert a copy of this call with an activation before `before`."""
        return rewriter.changed(before, self.node, activation=activation)


def joined_bias(rewriter: Rewriter, calls: list[LinearCall]) -> Node | None:
    """Return the joined biases of several layers, with zeros for missing ones; None if no layer has a bias."""
    biases = [call.bias for call in calls if call.bias is not None]
    sizes = tuple((call.out_features, call.bias is not None) for call in calls)
    return rewriter.derived(JoinedBiases(sizes), biases)[0] if biases else None


def pack_linears(rewriter: Rewriter) -> int:
    """Replace linear layers by `linear` on packed weights. Return how many."""
    return sum(_pack(rewriter, node) for node in rewriter.calls(*_PRODUCTS))


def _pack(rewriter: Rewriter, node: Node) -> bool:
    input, weight, bias, transposed = _read(node)
    if not _fits(rewriter, node, input, weight, bias):
        return False
    out_features = int(value(weight).shape[1 if transposed else 0])
    if out_features < MIN_OUT_FEATURES:
        return False
    weight_dtype = str(value(weight).dtype).removeprefix("torch.")
    dtype = rewriter.dtype or node.meta.get(PACKED_AS, weight_dtype)
    data, *scale = rewriter.derived(PackedLinears(dtype, transposed), [weight])
    input = _unflattened(input)
    product = rewriter.call(
        node,
        ours.linear.default,
        input=input,
        weight=data,
        scale=scale[0] if scale else None,
        bias=bias,
        out_features=out_features,
        activation="none",
    )
    if value(product).dim() != value(node).dim():
        product = rewriter.call(node, aten.view.default, product, [-1, out_features])
    rewriter.replace(node, product)
    return True


def _unflattened(input: Node) -> Node:
    """Return the tensor [..., K] that was flattened to the matrix `input`, or `input`."""
    if is_call(input, *VIEWS) and value(input).dim() == 2:
        source: Node = args_of(input)[0]
        if same_size(value(source).shape[-1], value(input).shape[-1]):
            return source
    return input


def _read(node: Node) -> tuple[Node, Node, Node | None, bool]:
    """Return the input, weight and bias, and whether the weight is [K, N]."""
    if node.target is aten.linear.default:
        input, weight, bias = (*args_of(node), None)[:3]
        return input, weight, bias, False
    if node.target is aten.addmm.default:
        bias, input, weight = args_of(node)
        return input, weight, bias, True
    input, weight = args_of(node)
    if isinstance(weight, Node) and _is_transposition(weight):
        return input, args_of(weight)[0], None, False
    return input, weight, None, True


def _is_transposition(node: Node) -> bool:
    if node.target in (aten.t.default, aten.numpy_T.default):
        return True
    return node.target is aten.transpose.int and {axis(d, 2) for d in args_of(node)[1:3]} == {0, 1}


def _fits(rewriter: Rewriter, node: Node, input: Node, weight: Node, bias: Node | None) -> bool:
    if not rewriter.is_constant(weight) or node.kwargs or rewriter.is_written(weight):
        return False
    if value(weight).dim() != 2 or value(weight).dtype not in FLOATING or value(input).dim() < 2:
        return False
    if bias is not None and value(bias).dim() != 1:
        return False
    return value(node).dtype is value(input).dtype is value(weight).dtype
