"""Graphs that torch's or torchao's PT2E flow has quantized: which they are, and the linears that are made of them.

Weights are numbers of 8 bits that the graph widens before each product; activations are rounded to 8 bits and widened again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from hf_cpu_accel.checkpoints.stored_weight import StoredWeight


def is_rounding(target: object, name: str = "") -> bool:
    """Whether a node of a graph calls one of the ops by which such graphs round and widen."""
    return str(target).startswith(f"quantized_decomposed.{name}")


def is_quantized_graph(module: nn.Module) -> TypeGuard[GraphModule]:
    """Whether `module` is a graph that widens what is in 8 bits. Such a graph has no modes, whatever its flag says."""
    return isinstance(module, GraphModule) and any(
        is_rounding(node.target, "dequantize_per") for node in module.graph.nodes
    )


class WidenedLinear(nn.Module):
    """y = x W^T + b in plain torch, where W is widened in each call: what serves where nothing is packed.

    Args:
        widen: () -> the weight [out_features, in_features] in floating point.
        rounds: whether the graph rounds what it multiplies with W to 8 bits.
    """

    def __init__(self, widen: Callable[[], Tensor], bias: nn.Parameter | None, *, rounds: bool) -> None:
        super().__init__()
        self.widen, self.rounds = widen, rounds
        self.out_features, self.in_features = widen().shape
        self.register_parameter("bias", bias)
        self.weight = None

    def forward(self, input: Tensor) -> Tensor:
        bias: Tensor | None = self._parameters["bias"]
        return F.linear(input, self.widen().to(input.dtype), bias)


def read(module: nn.Module) -> StoredWeight | None:
    if not isinstance(module, WidenedLinear):
        return None
    linear = module
    return StoredWeight(
        "PT2E int8" if linear.rounds else "PT2E int8 weight",
        linear.out_features,
        linear.in_features,
        0,
        0,
        None,
        (),
        values=lambda first, last: linear.widen()[first:last].float(),
        meant_for="int8" if linear.rounds else "int8-weight",
    )
