"""Linears that share a float32 weight with an embedding: vocabulary heads. A packed copy would hold it twice, so it stays as it is,
and is packed panel by panel as it is multiplied by more than a few rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference, fused_layer
from hf_cpu_accel.patching.restore import swap_module
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import Context, refusal, shares_weight
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.core.verify import disagreement

STRUCTURE = "linear (shared weight)"

_ROWS = 9  # that are tried: of a few, the weight is not packed


class SharedLinear(FusedModuleMixin):
    """Mixed into the class of the original, whose parameters it has: input [..., in_features] -> [..., out_features]."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._takes(args, kwargs):
            return self._original_class.forward(self, *args, **kwargs)
        return multiply(args[0], self.weight, self.bias)

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        return Reference(args, kwargs) if self._takes(args, kwargs) else None

    def _takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return len(args) == 1 and not kwargs and not self.is_edited and _is_ours(args[0], self.weight)


def multiply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`; by our op where that takes the weight as it is."""
    if not _is_ours(input, weight):
        return functional.linear(input, weight, bias)
    product: Tensor = torch.ops.hf_cpu_accel.linear(
        ordinary(input), weight, None, bias, None, weight.shape[0], "none"
    )
    return product


def _is_ours(input: Any, weight: Tensor) -> bool:
    if not isinstance(input, Tensor) or not input.dtype is weight.dtype is torch.float32:
        return False
    if input.shape[-1:] != weight.shape[1:] or not input.numel():
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"):
        return False
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (input, weight))
    return not trains and weight.is_contiguous()


class SharedLinearRule:
    """A linear that would be packed but for what else has its weight."""

    name = "shared linear"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if not isinstance(module, nn.Linear) or module.weight.dtype is not torch.float32:
            return None
        reason = shares_weight(module, path, context)
        if reason is None or refusal(module, path, context) != reason:
            return None
        return Match(module, path, fused_layer(SharedLinear, module))

    def apply(self, match: Match, context: Context) -> Outcome:
        linear, fused = match.module, match.found
        assert isinstance(linear, nn.Linear)
        if context.verifies:
            generator = torch.Generator().manual_seed(0)
            input = torch.randn(_ROWS, linear.in_features, generator=generator)
            with torch.no_grad():
                reason = disagreement(fused(input), linear(input), "float32", torch.float32)
            if reason is not None:
                return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), (linear,))
        swap_module(context.journal, context.slots[id(linear)], fused)
        item = PlanItem(match.path, STRUCTURE, "linear", "float32", packed_bytes=0, reason=None)
        return Outcome((item,), (linear,))
