"""A linear with its weight in the format of the checkpoint, without the checkpoint's own package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cpu_accel.checkpoints.layout import Layout


class StoredLinear(nn.Module):
    """y = x W^T + b in PyTorch, [..., in_features] -> [..., out_features]: the module that a checkpoint is loaded into.

    It also computes the output if it is not packed. Its parameters are the tensors of the checkpoint under their names, on the meta
    device until they are loaded. `model.to(dtype)` casts only the bias.

    Attributes:
        layout: the layout of the weight in the tensors.
    """

    def __init__(self, layout: Layout, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.layout = layout
        self.in_features, self.out_features = layout.in_features, layout.out_features
        for name, tensor in layout.held.items():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_parameter("bias", bias)
        if "weight" not in layout.held:
            self.weight = None  # models read its dtype (T5)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the weight, by name."""
        return {name: self.get_parameter(name) for name in self.layout.held}

    def dequantize(self) -> Tensor:
        """Return the weight [out_features, in_features] in float32."""
        return self.layout.dequantize(self.tensors)

    def forward(self, input: Tensor) -> Tensor:
        bias: Tensor | None = self._parameters["bias"]
        return F.linear(input, self.dequantize().to(input.dtype), bias)

    def extra_repr(self) -> str:
        return f"{self.layout.form}, in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredLinear:
        stored = {name: self._parameters.pop(name) for name in self.layout.held}
        bias = self._parameters.pop("bias")
        try:
            self._parameters["bias"] = bias
            super()._apply(fn, recurse)
        finally:
            bias = self._parameters.pop("bias")
            self._parameters.update(stored)
            self._parameters["bias"] = bias
        for name in self.layout.held:
            parameter: Any = self._parameters[name]
            device = fn(torch.empty(0, device=parameter.device)).device
            if device != parameter.device:
                self._parameters[name] = nn.Parameter(parameter.to(device), requires_grad=False)
        return self
