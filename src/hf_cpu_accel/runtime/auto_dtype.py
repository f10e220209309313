"""The dtype that `dtype="auto"` stands for."""

from __future__ import annotations

import torch
from torch import nn

from hf_cpu_accel.runtime import hardware


def auto_dtype(module: nn.Module) -> str:
    """Return the dtype for `dtype="auto"`: "bfloat16" where it is faster than float32, else "float32".

    bfloat16 is faster on CPUs with bfloat16 products. It is also faster on any CPU for models that generate text: they read all
    weights for each token, so half the bytes take half the time. bfloat16 weights are not widened, which would gain nothing.
    """
    can_generate = getattr(module, "can_generate", None)
    generates = callable(can_generate) and bool(can_generate())
    weights = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    narrow = bool(weights) and all(weight.dtype is torch.bfloat16 for weight in weights)
    return "bfloat16" if generates or narrow or hardware.native_bf16_is_fast() else "float32"
