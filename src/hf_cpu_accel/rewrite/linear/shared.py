"""Linears that share a float32 weight with an embedding: vocabulary heads. A packed copy would store it twice, so the weight
stays unpacked, and panels are packed while it is multiplied by more than a few rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.check import compare
from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.ops.derivatives import wants_derivative
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, fused_layer
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import Context, linear_refusal, shares_weight
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.core.verify import probe
from hf_cpu_accel.runtime.tracing import is_tracing
from hf_cpu_accel.tolerance import PACKED

STRUCTURE = "linear (shared weight)"


class SharedLinear(FusedModuleMixin):
    """Mixed into the class of the original, whose parameters it has: input [..., in_features] -> [..., out_features], see
    `multiply`."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or self.is_edited:
            return self._original_class.forward(self, *args, **kwargs)
        return multiply(args[0], self.weight, self.bias)


def multiply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `functional.linear`, by the op of this package if it supports the weight, the input is float32, and no gradient is
    needed.

    Args:
        input: [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features] or None.

    Returns:
        [..., out_features], dtype of the input.
    """
    if not _is_ours(input, weight, bias):
        return functional.linear(input, weight, bias)
    product: Tensor = torch.ops.hf_cpu_accel.linear(
        ordinary(input), weight, None, bias, None, weight.shape[0], "none"
    )
    return product


def _is_ours(input: Any, weight: Tensor, bias: Tensor | None) -> bool:
    if not isinstance(input, Tensor) or input.dtype is not torch.float32 or not supports_weight(weight):
        return False
    if input.shape[-1:] != weight.shape[1:] or not input.numel():
        return False
    if is_tracing() or torch.is_autocast_enabled("cpu"):
        return False
    return not wants_derivative(input, weight, bias)


def supports_weight(weight: Tensor) -> bool:
    """Return whether the op of this package supports the weight without packing."""
    return weight.dtype is torch.float32 and weight.dim() == 2 and weight.is_contiguous()


class SharedLinearRule:
    """A linear that would be packed if it did not share its weight."""

    name = "shared linear"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if not isinstance(module, nn.Linear) or not supports_weight(module.weight):
            return None
        reason = shares_weight(module, path, context)
        if reason is None or linear_refusal(module, path, context) != reason:
            return None
        return Match(module, path, fused_layer(SharedLinear, module))

    def apply(self, match: Match, context: Context) -> Outcome:
        linear, fused = match.module, match.data
        assert isinstance(linear, nn.Linear)
        if context.verifies:
            input = probe(linear.in_features, torch.float32)
            with torch.no_grad():
                # A few rows, and more: two kernels.
                reason = compare(fused(input[:, 0]), linear(input[:, 0])).reason(PACKED.float32)
                reason = reason or compare(fused(input), linear(input)).reason(PACKED.float32)
            if reason is not None:
                return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), (linear,))
        context.swap(linear, fused)
        item = PlanItem(match.path, STRUCTURE, "linear", "float32", packed_bytes=0, reason=None)
        return Outcome((item,), (linear,))
