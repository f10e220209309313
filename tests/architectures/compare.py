"""How far the outputs of an accelerated model are from eager ones, and how far they may be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_cpu_accel.check import compare
from hf_cpu_accel.tolerance import PACKED
from tests.architectures.find import Outputs, run, tokens_of
from tests.architectures.inputs import nested
from tests.architectures.small import CHOSEN, exceptions

# How far rounding the weights to a dtype moves them: what an unfused model with such weights is off by is nobody's mistake.
_ROUNDING = {"float32": 3e-6, "bfloat16": 4e-3, "int8": 1.5e-2, "int4": 0.1}
_TIMES = 4.0
_MOST_ROWS = 0.75


def compare_all(
    model: nn.Module,
    dtype: str,
    calls: Any,
    ours: dict[str, Outputs],
    problems: list[str],
    told: dict[str, Any],
) -> None:
    worst = 0.0
    chosen = exceptions().get(model.config.model_type, {}).get("chosen", ())
    for side, (batch, tokens, theirs) in calls.items():
        if dtype != "float32":
            theirs = {name: tensor for name, tensor in theirs.items() if name.strip(".") not in chosen}
            ours[side] = {name: tensor for name, tensor in ours[side].items() if name in theirs}
        errors = _errors(ours[side], theirs, tokens)
        if not errors:
            continue
        name, error = max(errors.items(), key=lambda pair: pair[1])
        worst = max(worst, error)
        allowed = PACKED.of(dtype)
        if error > allowed:
            told["sensitive"] = True
            noisy = _noisy(model, dtype, batch, theirs, tokens)
            if error > max(allowed, _TIMES * noisy) and not _few_rows(
                model, dtype, ours[side], theirs, tokens
            ):
                name = name.strip(".")
                problems.append(
                    f"{dtype}, {side}: {name} is off by {error:.1e} (allowed {allowed:.0e}, noise {noisy:.0e})"
                )
    told["error"] = max(worst, told.get("error", 0.0))


def _errors(ours: Outputs, theirs: Outputs, tokens: Tensor | None) -> dict[str, float]:
    """Relative to the norm."""
    if set(ours) != set(theirs):
        return {f"names {set(ours) ^ set(theirs)}": float("inf")}
    return {name: _error(tokens_of(ours[name], tokens), tokens_of(theirs[name], tokens)) for name in theirs}


def _error(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    finite = theirs.isfinite()
    if not torch.equal(finite, ours.isfinite()):
        return float("inf")
    ours, theirs = ours[finite].double(), theirs[finite].double()
    norm = theirs.norm().item()
    return (ours - theirs).norm().item() / max(norm, 1e-6)


def _few_rows(model: nn.Module, dtype: str, ours: Outputs, theirs: Outputs, tokens: Tensor | None) -> bool:
    """Whether, in a model that chooses experts or keys, one of four rows at most is moved: two may be nearly as good."""
    if dtype == "float32" or set(ours) != set(theirs) or not _chooses(model.config):
        return False
    pairs = [(tokens_of(ours[name], tokens), tokens_of(theirs[name], tokens)) for name in theirs]
    if any(one.shape != other.shape or one.dim() < 2 for one, other in pairs):
        return False
    errors = torch.cat([part.flatten() for one, other in pairs for part in compare(one, other).errors])
    return bool((errors.nan_to_num(nan=float("inf")) <= PACKED.of(dtype)).double().mean() >= _MOST_ROWS)


def _chooses(config: PretrainedConfig) -> bool:
    names = (name for part in nested(config) for name, value in vars(part).items() if value)
    return any(CHOSEN.search(name) for name in names)


@torch.no_grad()
def _noisy(
    model: nn.Module, dtype: str, batch: dict[str, Any], theirs: Outputs, tokens: Tensor | None
) -> float:
    """How far eager is moved by weights that are off as by rounding: the worse of three tries."""
    clean = {name: tensor for name, tensor in run(model, batch).items() if name in theirs}
    saved = {name: p.clone() for name, p in model.named_parameters()}
    worst = 0.0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * saved[name].square().mean().sqrt()
            if parameter.dim() >= 2:
                parameter.copy_(saved[name] + _ROUNDING[dtype] * noise)
        moved = {name: tensor for name, tensor in run(model, batch).items() if name in theirs}
        errors = _errors(moved, clean, tokens)
        finite = [error for error in errors.values() if error != float("inf")]
        worst = max(worst, *finite, 0.0)
    for name, parameter in model.named_parameters():
        parameter.copy_(saved[name])
    return worst
