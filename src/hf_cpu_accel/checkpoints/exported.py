"""Graphs quantized by the PT2E flow of torch or torchao, and the linears created from them.

Weights are 8-bit numbers that the graph dequantizes before each product. Activations are quantized to 8 bits and dequantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from hf_cpu_accel.checkpoints.stored_weight import StoredWeight


def is_rounding(target: object, name: str = "") -> bool:
    """Return whether `target` is one of the ops that quantize and dequantize in these graphs."""
    return str(target).startswith(f"quantized_decomposed.{name}")


def is_quantized_graph(module: nn.Module) -> TypeGuard[GraphModule]:
    """Return whether `module` is a graph that dequantizes 8-bit numbers. It has neither training nor eval mode."""
    return isinstance(module, GraphModule) and any(
        is_rounding(node.target, "dequantize_per") for node in module.graph.nodes
    )


class WidenedLinear(nn.Module):
    """y = x W^T + b in PyTorch, with W dequantized in each call; used if it is not packed.

    Args:
        widen: () -> the weight [out_features, in_features] in floating point.
        bias: of the linear, or None.
        rounds: whether the graph rounds the input to 8 bits.
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
