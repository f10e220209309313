"""One model type: built small, run, accelerated in each dtype, compared, restored, compared bit by bit."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.core.tolerance import PACKED
from hf_cpu_accel.rewrite.core.verify import row_errors
from tests.architectures.inputs import Maker, nested, padded
from tests.architectures.models import build, classes_of
from tests.architectures.small import CHOSEN, exceptions, small_configs

DTYPES = ("float32", "bfloat16", "int8", "int4")
# How far rounding the weights to a dtype moves them: what an unfused model with such weights is off by is nobody's mistake.
_ROUNDING = {"float32": 3e-6, "bfloat16": 4e-3, "int8": 1.5e-2, "int4": 0.1}
_TIMES = 4.0
_MOST_ROWS = 0.75
_SEARCH = float(os.environ.get("ARCHITECTURES_SECONDS", "5"))  # of CPU time for finding a config and a call
_VAGUE = "no rule knows this structure"

Outputs = dict[str, Tensor]


def check(model_type: str, dtypes: tuple[str, ...] = DTYPES) -> dict[str, Any]:
    """What became of `model_type`: {"type", "status": "right", "wrong", "not explained" or "not run", ...}."""
    started = time.process_time()
    result: dict[str, Any] = {"type": model_type, "status": "right", "problems": []}
    why = exceptions().get(model_type, {}).get("why")
    if why is not None:
        return {**result, "status": "not run", "reason": why}
    found = _find(model_type)
    if isinstance(found, list):
        seconds = round(time.process_time() - started, 2)
        return {
            **result,
            "status": "not run",
            "reason": _most_telling(found),
            "tried": found[:20],
            "seconds": seconds,
        }
    model, batch, recipe = found
    used = {n: list(v.shape) if isinstance(v, Tensor) else v for n, v in batch.items()}
    result |= {"class": type(model).__name__, "recipe": recipe, "inputs": used}
    result["parameters"] = sum(p.numel() for p in model.parameters())
    calls = _calls(model, batch)
    result["padding"] = [side for side in calls if side != "plain"]
    result["dtypes"] = {}
    for dtype in dtypes:
        if dtype == "int4" and not _generates(model):
            continue
        result["dtypes"][dtype] = _check_dtype(model, dtype, calls, result["problems"])
    unexplained = sorted({path for told in result["dtypes"].values() for path in told.get("unexplained", ())})
    result["status"] = "wrong" if result["problems"] else "not explained" if unexplained else "right"
    if unexplained:
        result["problems"].append(f"not explained: {', '.join(unexplained[:4])} ({len(unexplained)} in all)")
    return {**result, "seconds": round(time.process_time() - started, 2)}


def _generates(model: Any) -> bool:
    return "input_ids" in model.main_input_name or bool(model.can_generate())


def _find(model_type: str) -> tuple[PreTrainedModel, dict[str, Any], str] | list[str]:
    """The first small model that can be built and called, its batch, and how it was made; or why there is none, by try."""
    reasons: list[str] = []
    until = time.process_time() + _SEARCH
    for recipe, config in _configs(model_type, reasons):
        classes = classes_of(model_type, config)
        if not classes:
            return ["no model class is built from this config"]
        for cls in classes[:2]:
            try:
                model = build(cls, config)
            except Exception as error:
                reasons.append(f"{cls.__name__} ({recipe}) is not built: {_told(error)}")
                if isinstance(error, ImportError) or time.process_time() > until:
                    return reasons
                continue
            for batch in Maker(model).batches():
                if time.process_time() > until:
                    return [*reasons, f"nothing was found in {_SEARCH:g} seconds of CPU time"]
                try:
                    outputs = run(model, batch)
                except Exception as error:
                    reasons.append(
                        f"{cls.__name__} ({recipe}) is not called with {', '.join(batch)}: {_told(error)}"
                    )
                    continue
                if outputs and all(t.isfinite().any() and t.numel() for t in outputs.values()):
                    return model, batch, recipe
                reasons.append(f"{cls.__name__} ({recipe}) gives no numbers")
    return reasons


def _configs(model_type: str, reasons: list[str]) -> Iterator[tuple[str, PretrainedConfig]]:
    try:
        yield from small_configs(model_type)
    except Exception as error:
        reasons.append(f"config: {_told(error)}")


def _most_telling(reasons: list[str]) -> str:
    called = [r for r in reasons if "is not called" in r]
    return (called or reasons or ["no inputs are known"])[0]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def run(model: nn.Module, batch: dict[str, Any]) -> Outputs:
    """All floating-point tensors of the output, by their paths."""
    torch.manual_seed(0)
    copies = {n: v.clone() if isinstance(v, Tensor) else v for n, v in batch.items()}
    with torch.no_grad():
        output = model(**copies)
    outputs: Outputs = {}
    _gather(output, "", outputs)
    return {name: tensor.clone() for name, tensor in outputs.items()}


def _gather(value: Any, path: str, into: Outputs) -> None:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            into[path] = value.detach()
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in ("past_key_values", "mems", "cache_params", "state", "attentions"):
                _gather(inner, f"{path}.{name}", into)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _gather(inner, f"{path}.{number}", into)


def _calls(
    model: nn.Module, batch: dict[str, Any]
) -> dict[str, tuple[dict[str, Any], Tensor | None, Outputs]]:
    """{name: (batch, tokens or None, what eager gives)}; padded ones only where eager takes them."""
    calls = {"plain": (batch, None, run(model, batch))}
    for side, (padded_batch, tokens) in padded(batch, model).items():
        try:
            outputs = run(model, padded_batch)
        except Exception:
            continue
        if all(_tokens_of(t, tokens).isfinite().all() for t in outputs.values()):
            calls[side] = (padded_batch, tokens, outputs)
    return calls


def _tokens_of(tensor: Tensor, tokens: Tensor | None) -> Tensor:
    """Without what stands at the padding."""
    if tokens is None or tensor.dim() < 2 or tensor.shape[:2] != tokens.shape:
        return tensor
    return tensor[tokens]


def _check_dtype(model: nn.Module, dtype: str, calls: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    state = {name: (t.clone(), t.stride()) for name, t in model.state_dict().items()}
    modules = [(path, id(module)) for path, module in model.named_modules()]
    weighted = [path for path, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    told: dict[str, Any] = {}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerate_for_cpu(model, dtype=dtype)
            ours = {name: run(model, batch) for name, (batch, _, _) in calls.items()}
            plan = explain(model)
        told = {"replaced": len(plan.replaced), "left": len(plan.left), "fused": _fused(plan)}
        problems += [f"{dtype}: {w.message}" for w in caught if "fused by hf_cpu_accel" in str(w.message)]
        unexplained = _unexplained(plan, weighted)
        if unexplained:
            told["unexplained"] = unexplained
    except Exception as error:
        problems.append(f"{dtype}: raises {_told(error)}")
        restore(model)
        return told
    restore(model)
    _compare_all(model, dtype, calls, ours, problems, told)
    _check_restored(model, dtype, state, modules, calls, problems)
    return told


def _fused(plan: Any) -> int:
    return sum(item.structure.endswith("layer") for item in plan.replaced)


def _unexplained(plan: Any, weighted: list[str]) -> list[str]:
    """Modules with weights of their own that are neither replaced nor have a reason that names the obstacle."""
    reasons = {item.name: item.reason for item in plan.items}
    whole = [item.name for item in plan.items if item.reason is None]
    missing = []
    for path in weighted:
        reason = reasons.get(path, "")
        inside = any(path.startswith(f"{name}.") or path == name for name in whole)
        if not inside and (path not in reasons or reason == _VAGUE):
            missing.append(path)
    return missing


def _compare_all(
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
    told["error"] = worst


def _errors(ours: Outputs, theirs: Outputs, tokens: Tensor | None) -> dict[str, float]:
    """Relative to the norm."""
    if set(ours) != set(theirs):
        return {f"names {set(ours) ^ set(theirs)}": float("inf")}
    return {name: _error(_tokens_of(ours[name], tokens), _tokens_of(theirs[name], tokens)) for name in theirs}


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
    pairs = [(_tokens_of(ours[name], tokens), _tokens_of(theirs[name], tokens)) for name in theirs]
    if any(one.shape != other.shape or one.dim() < 2 for one, other in pairs):
        return False
    errors = torch.cat([row_errors(one, other).flatten() for one, other in pairs])
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


def _check_restored(
    model: nn.Module, dtype: str, state: Any, modules: Any, calls: Any, problems: list[str]
) -> None:
    now = model.state_dict()
    changed = [n for n, (t, strides) in state.items() if not _same(now[n], t) or now[n].stride() != strides]
    if changed:
        problems.append(f"{dtype}: not restored: {', '.join(changed[:4])}")
    if [(path, id(module)) for path, module in model.named_modules()] != modules:
        problems.append(f"{dtype}: other modules after restore")
    batch, _, theirs = calls["plain"]
    again = run(model, batch)
    if any(not _same(again[name], theirs[name]) for name in theirs):
        problems.append(f"{dtype}: other outputs after restore")


def _same(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    )
