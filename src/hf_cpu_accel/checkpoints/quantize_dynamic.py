"""Linears that torch's own `quantize_dynamic` has made: weights in 8 bits, or in half precision, behind an object of torch's."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from hf_cpu_accel.checkpoints.stored_weight import StoredWeight


def read(module: nn.Module) -> StoredWeight | None:
    """A `torch.ao.nn.quantized.dynamic.Linear`."""
    host = sys.modules.get("torch.ao.nn.quantized.dynamic")
    if host is None or not isinstance(module, host.Linear):
        return None
    linear: Any = module
    integers = linear.weight().is_quantized
    form = f"torch.ao dynamic {'int8' if integers else 'float16'}"
    return StoredWeight(
        form,
        linear.out_features,
        linear.in_features,
        0,
        0,
        None,
        (),
        None if type(module) is host.Linear else f"{form}: its class, {type(module).__name__}, does more",
        values=lambda first, last: _values(linear)[first:last],
        agreement="int8" if integers else "float32",
        reference=lambda input: linear(input.float()).to(input.dtype),
        meant_for="int8" if integers else None,
    )


def is_inference_only(module: nn.Module) -> bool:
    """Whether torch.ao made `module` out of a trained one, or out of an observer: it comes in training mode, and has none."""
    return type(module) is nn.Identity or type(module).__module__.startswith(
        ("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")
    )


def _values(linear: Any) -> Tensor:
    weight: Tensor = linear.weight()
    return weight.dequantize().float()
