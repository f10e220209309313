"""The linears of torch's `quantize_dynamic`: weights in 8 bits or float16 in an opaque object."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from hf_cpu_accel.checkpoints.stored_weight import StoredWeight


def read(module: nn.Module) -> StoredWeight | None:
    """Read a `torch.ao.nn.quantized.dynamic.Linear`; None for other modules."""
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
        None
        if type(module) is host.Linear
        else f"{form}: the subclass {type(module).__name__} is not supported",
        values=lambda first, last: _values(linear)[first:last],
        agreement="int8" if integers else "float32",
        reference=lambda input: linear(input.float()).to(input.dtype),
        meant_for="int8" if integers else None,
    )


def is_inference_only(module: nn.Module) -> bool:
    """Return whether torch.ao converted `module`: its training flag is set, but it has no training mode."""
    return type(module) is nn.Identity or type(module).__module__.startswith(
        ("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")
    )


def _values(linear: Any) -> Tensor:
    weight: Tensor = linear.weight()
    return weight.dequantize().float()
