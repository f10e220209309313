"""Who is measured: each system turns a float32 eager model into the thing that is timed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch._inductor.config
from torch import nn

from hf_cpu_accel import accelerate_for_cpu

Prepare = Callable[[nn.Module], nn.Module]

BASE = "eager-fp32"


def _eager(model: nn.Module) -> nn.Module:
    return model


def _eager_bf16(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def _compiled(model: nn.Module, dtype: torch.dtype, freezing: bool = False) -> nn.Module:
    # While tracing, only the global switch is read; a worker is one system, so nothing else sees it.
    torch._inductor.config.freezing = freezing
    return torch.compile(model.to(dtype), dynamic=False)  # type: ignore[return-value]


def _quantize_dynamic(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and still what many people run
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def _ours(model: nn.Module, dtype: str) -> nn.Module:
    return accelerate_for_cpu(model, dtype=dtype)


SYSTEMS: dict[str, Prepare] = {
    BASE: _eager,
    "eager-bf16": _eager_bf16,
    "compile-fp32": partial(_compiled, dtype=torch.float32),
    "compile-bf16": partial(_compiled, dtype=torch.bfloat16),
    "compile-freeze-fp32": partial(_compiled, dtype=torch.float32, freezing=True),
    "compile-freeze-bf16": partial(_compiled, dtype=torch.bfloat16, freezing=True),
    "quantize-dynamic": _quantize_dynamic,
    "ours-fp32": partial(_ours, dtype="float32"),
    "ours-bf16": partial(_ours, dtype="bfloat16"),
    "ours-int8": partial(_ours, dtype="int8"),
}

# The compiled ones take tens of seconds to start: they run when asked for.
DEFAULT = tuple(name for name in SYSTEMS if not name.startswith("compile"))
