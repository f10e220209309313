"""Inputs and calls to verify a replacement with. `hf_cpu_accel.check` compares its outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.tolerance import ROW_SUMS

_BATCH, _TOKENS = 2, 3


def probe(features: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """Return a random input [2, 3, features], the same in every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(_BATCH, _TOKENS, features, generator=generator).to(dtype)


def are_probabilities(value: Tensor) -> bool:
    """Return whether `value` is attention weights [B, heads, L, keys], which some layers return without being asked and callers
    ignore."""
    sums = value.float().sum(dim=-1)
    return value.dim() == 4 and compare(sums, torch.ones_like(sums)).within(ROW_SUMS)


def run(module: nn.Module, *inputs: Tensor) -> Any:
    """Return `module.forward(*inputs)` without gradients; a lazy output is computed, so that errors show now."""
    with torch.no_grad():
        return ordinary(module.forward(*inputs))


def run_alone(module: nn.Module, *inputs: Tensor) -> Tensor | None:
    """Return `run(module, *inputs)`, or None if the module raises or returns no tensor."""
    output = call_foreign(run, module, *inputs)
    return output if isinstance(output, Tensor) else None
