"""One model type: built small, run, accelerated in each dtype, compared, restored, compared bit by bit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.capture.program_layer import ProgramLayer
from hf_cpu_accel.rewrite.core.first_call import LEFT
from hf_cpu_accel.rewrite.core.refusal import RECORDED
from tests.architectures.compare import compare_all
from tests.architectures.find import Outputs, calls_of, find_model, run
from tests.architectures.find import told as said
from tests.architectures.generating import generation_problems
from tests.architectures.layers import attends, linears_of_layers, told_of_layers
from tests.architectures.small import exceptions
from tests.architectures.towers import towers_of

DTYPES = ("float32", "bfloat16", "int8", "int4")
_VAGUE = "no rule knows this structure"


def check(model_type: str, dtypes: Sequence[str] = DTYPES, *, generates: bool = True) -> dict[str, Any]:
    """What became of `model_type`: {"type", "status": "right", "wrong", "not explained" or "not run", ...}."""
    started = time.process_time()
    result: dict[str, Any] = {"type": model_type, "status": "right", "problems": []}
    why = exceptions().get(model_type, {}).get("why")
    if why is not None:
        return {**result, "status": "not run", "reason": why}
    found = find_model(model_type)
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
    result |= {"class": type(model).__name__, "recipe": recipe, "inputs": _shapes(batch)}
    result["parameters"] = sum(p.numel() for p in model.parameters())
    calls = calls_of(model, batch)
    linears = linears_of_layers(model)
    towers = towers_of(model, list(linears), lambda: run(model, batch))
    if linears and attends(model, list(linears), lambda: run(model, batch)):
        result["layers"] = {path: type(model.get_submodule(path)).__name__ for path in linears}
    result["padding"] = [side for side in calls if side != "plain"]
    result["dtypes"] = {}
    for dtype in dtypes:
        if dtype == "int4" and not _generates(model):
            continue
        result["dtypes"][dtype] = _check_dtype(model, dtype, calls, towers, linears, result["problems"])
    if generates:
        result["problems"] += generation_problems(model_type, model.config)
    unexplained = sorted({path for told in result["dtypes"].values() for path in told.get("unexplained", ())})
    result["status"] = "wrong" if result["problems"] else "not explained" if unexplained else "right"
    if unexplained:
        result["problems"].append(f"not explained: {', '.join(unexplained[:4])} ({len(unexplained)} in all)")
    return {**result, "seconds": round(time.process_time() - started, 2)}


def _shapes(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shapes(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shapes(inner) for inner in value]
    return list(value.shape) if isinstance(value, Tensor) else value


def _generates(model: Any) -> bool:
    return "input_ids" in model.main_input_name or bool(model.can_generate())


def _most_telling(reasons: list[str]) -> str:
    called = [r for r in reasons if "is not called" in r]
    return (called or reasons or ["no inputs are known"])[0]


def _check_dtype(
    model: nn.Module,
    dtype: str,
    calls: dict[str, Any],
    towers: dict[str, Any],
    linears: dict[str, list[str]],
    problems: list[str],
) -> dict[str, Any]:
    state = {name: (t.clone(), t.stride()) for name, t in model.state_dict().items()}
    modules = [(path, id(module)) for path, module in model.named_modules()]
    weighted = [path for path, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    told: dict[str, Any] = {}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerate_for_cpu(model, dtype=dtype)
            ours, by_towers = run_all(model, calls, towers)
            plan = explain(model)
        told = {"replaced": len(plan.replaced), "left": len(plan.left)}
        told["layers"] = told_of_layers(linears, plan) | _not_called(model, linears)
        told["recorded"] = plan.counts().get(RECORDED, 0)
        problems += [f"{dtype}: {w.message}" for w in caught if "fused by hf_cpu_accel" in str(w.message)]
        unexplained = _unexplained(plan, weighted)
        if unexplained:
            told["unexplained"] = unexplained
    except Exception as error:
        problems.append(f"{dtype}: raises {said(error)}")
        restore(model)
        return told
    restore(model)
    compare_all(model, dtype, calls, ours, problems, told)
    for path, call in towers.items():
        inside = model.get_submodule(path)
        compare_all(inside, dtype, {path: call}, {path: by_towers[path]}, problems, told)
    _check_restored(model, dtype, state, modules, calls, problems)
    return told


def run_all(
    model: nn.Module, calls: dict[str, Any], towers: dict[str, Any]
) -> tuple[dict[str, Outputs], dict[str, Outputs]]:
    """Return the outputs of the calls of a model, and of the models inside that have calls of their own."""
    outputs = {name: run(model, batch) for name, (batch, _, _) in calls.items()}
    inside = {path: run(model.get_submodule(path), batch) for path, (batch, _, _) in towers.items()}
    return outputs, inside


def _not_called(model: nn.Module, linears: dict[str, list[str]]) -> dict[str, str]:
    """{path of a layer that would be recorded in its first call, which there was none of: that}."""
    parts = {path: model.get_submodule(path) for path in linears}
    waiting = (
        path
        for path, part in parts.items()
        if isinstance(part, ProgramLayer) and not (part._programs or LEFT in vars(part))
    )
    return dict.fromkeys(waiting, "it is recorded on its first call, but no call here reached it")


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
