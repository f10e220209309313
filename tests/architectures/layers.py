"""What counts as a transformer layer, and which of a model's run as a whole.

A transformer layer is a member of a list of modules that holds at least four linears, as attention has for query, key, value and
output, and holds no such member itself. It is whole if each of its linears lies in a part that `explain()` calls a layer: one op
for it, the few of a layer with recurrence, latents or a grid, or the steps of a recorded one. A model has transformer layers if in
one of these attention is computed when it runs: convolutional networks, codecs and purely recurrent networks have none, however
many linears stand in their lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_cpu_accel.plan import Plan, PlanItem

_FEWEST = 4
_SOFTMAX = (torch.softmax, functional.softmax, torch.Tensor.softmax)
_ATTENTION = functional.scaled_dot_product_attention


def linears_of_layers(model: nn.Module) -> dict[str, list[str]]:
    """{path of a transformer layer: paths of its linears}; to be asked before the model is accelerated."""
    modules = dict(model.named_modules())
    linears = [path for path, module in modules.items() if _is_linear(module)]
    below = {path: [linear for linear in linears if linear.startswith(f"{path}.")] for path in modules}
    found = [path for path in modules if _is_listed(modules, path) and len(below[path]) >= _FEWEST]
    inner = [path for path in found if not any(other.startswith(f"{path}.") for other in found)]
    return {path: below[path] for path in inner}


def attends(model: nn.Module, paths: list[str], run: Callable[[], Any]) -> bool:
    """Whether `run`, a forward of the model, computes attention in a module at one of the paths."""
    inside: list[nn.Module] = []
    seen: list[nn.Module] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # A router's softmax is of tokens: [tokens, experts].
            if inside and (func is _ATTENTION or (func in _SOFTMAX and args and args[0].dim() > 2)):
                seen.extend(inside)
            return func(*args, **(kwargs or {}))

    hooks = []
    for path in paths:
        module = model.get_submodule(path)
        hooks.append(module.register_forward_pre_hook(lambda module, args: inside.append(module)))
        hooks.append(module.register_forward_hook(lambda module, args, output: inside.clear()))
    try:
        with Watch():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return bool(seen)


def told_of_layers(linears: dict[str, list[str]], plan: Plan) -> dict[str, str | None]:
    """{path of a transformer layer: None where it is whole, else why not}."""
    whole = [item.name for item in plan.replaced if item.scope == "layer"]
    refused = [item for item in plan.left if item.scope is not None]
    told: dict[str, str | None] = {}
    for path, inner in linears.items():
        is_whole = all(any(_is_within(linear, other) for other in whole) for linear in inner)
        told[path] = None if is_whole else _reason(path, refused)
    return told


def _reason(path: str, refused: list[PlanItem]) -> str:
    near = [item for item in refused if _is_within(item.name, path) or _is_within(path, item.name)]
    near.sort(key=lambda item: item.name != path)
    return str(near[0].reason) if near else "no matcher supports this form of layer"


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _is_listed(modules: dict[str, nn.Module], path: str) -> bool:
    above, _, name = path.rpartition(".")
    return name.isdigit() and isinstance(modules[above], nn.ModuleList | nn.Sequential)


def _is_within(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")
