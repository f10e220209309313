"""The systems: each turns a float32 eager model into the callable that is timed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu

BASE = "eager-fp32"


@dataclass(frozen=True)
class System:
    """
    Attributes:
        prepare: what is done to an eager model of `dtype`, whose float inputs have that dtype, too.
        calibrates: whether `prepare` takes `calibration=` besides, a list of batches of inputs.
    """

    prepare: Callable[..., nn.Module]
    dtype: torch.dtype = torch.float32
    calibrates: bool = False


def _eager(model: nn.Module) -> nn.Module:
    return model


def _compiled(model: nn.Module, freezing: bool = False) -> nn.Module:
    from torch._inductor import config  # takes a second, which only these two systems need

    # While tracing, only the global switch is read; a worker is one system, so nothing else sees it.
    config.freezing = freezing
    return torch.compile(model, dynamic=False)  # type: ignore[return-value]


def _quantize_dynamic(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and still what many people run
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def _ours(model: nn.Module, dtype: str) -> nn.Module:
    return accelerate_for_cpu(model, dtype=dtype)


def _compiler(model: nn.Module, dtype: str) -> nn.Module:
    """Return a model under our compiler alone, without rules for its modules."""
    return torch.compile(model, backend="hf_cpu_accel", dynamic=True, options={"dtype": dtype})  # type: ignore[return-value]


_FROZEN = partial(_compiled, freezing=True)

SYSTEMS: dict[str, System] = {
    BASE: System(_eager),
    "eager-bf16": System(_eager, torch.bfloat16),
    "compile-fp32": System(_compiled),
    "compile-bf16": System(_compiled, torch.bfloat16),
    "compile-freeze-fp32": System(_FROZEN),
    "compile-freeze-bf16": System(_FROZEN, torch.bfloat16),
    "quantize-dynamic": System(_quantize_dynamic),
    "ours-fp32": System(partial(_ours, dtype="float32")),
    "ours-bf16": System(partial(_ours, dtype="bfloat16")),
    "ours-int8": System(partial(_ours, dtype="int8")),
    "ours-int8-static": System(partial(_ours, dtype="int8-static"), calibrates=True),
    "compiler-fp32": System(partial(_compiler, dtype="float32")),
    "compiler-bf16": System(partial(_compiler, dtype="bfloat16"), torch.bfloat16),
    "compiler-int8": System(partial(_compiler, dtype="int8")),
}

# The compiled ones take tens of seconds to start, and those with examples long to see them: they run when asked for.
DEFAULT = tuple(name for name, system in SYSTEMS.items() if "compile" not in name and not system.calibrates)
