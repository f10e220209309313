"""Find the possible recurrent mixers of a module by the names of its parts."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hf_cpu_accel.rewrite.linear.output_order import can_be_ordered
from hf_cpu_accel.rewrite.recurrent.parts import (
    GatedDeltaNet,
    Mixer,
    ShortConvolution,
    StateSpace,
)
from hf_cpu_accel.rewrite.recurrent.selective import SelectiveStateSpace

NO_BOUNDS = (0.0, float("inf"))


def candidates(module: nn.Module) -> list[Mixer]:
    """Return the possible mixers of `module`; none if it holds something else."""
    names, own = set(module._modules), set(module._parameters)
    if names == {"in_proj", "conv", "out_proj"} and not own:
        return [ShortConvolution("conv", None)]
    if own == {"A_log", "dt_bias"} and {"conv1d", "norm", "out_proj"} <= names:
        projections = names - {"conv1d", "norm", "out_proj", "act"}
        interleaved = projections == {"in_proj_qkvz", "in_proj_ba"}
        if interleaved or projections == {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}:
            plain = GatedDeltaNet("conv1d", "norm", _eps_of(module), interleaved)
            ordered = interleaved and can_be_ordered(module, plain.projections)
            return [replace(plain, is_ordered=True), plain] if ordered else [plain]
    if own == {"A_log", "D", "dt_bias"} and {"conv1d", "in_proj", "out_proj"} <= names:
        norm = "norm" if "weight" in getattr(module._modules.get("norm"), "_parameters", ()) else None
        groups = sorted({1, int(getattr(module, "n_groups", 1))}, reverse=True)
        bounds = dt_bounds(module)
        return [
            StateSpace("conv1d", norm, _eps_of(module), count, gate_first, *bounds, bounds_steps)
            for bounds_steps in ((False,) if bounds == NO_BOUNDS else (False, True))
            for count in groups
            for gate_first in (True, False)
        ]
    if own == {"A_log", "D"} and {"conv1d", "in_proj", "x_proj", "dt_proj", "out_proj"} <= names:
        norms = ("dt_layernorm", "b_layernorm", "c_layernorm")
        return [SelectiveStateSpace("conv1d", None, norms if names.issuperset(norms) else None)]
    return []


def dt_bounds(module: nn.Module) -> tuple[float, float]:
    """Return the bounds of the time steps of a state space."""
    least, most = getattr(module, "time_step_limit", None) or NO_BOUNDS
    return float(least), float(most)


def _eps_of(module: nn.Module) -> float:
    norm = module._modules.get("norm")
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))
