"""Convolutions that compute their weight in each call, by weight norm (Salimans and Kingma 2016, arXiv:1602.07868). Rules get a
plain convolution with the same weight, computed once.

The replacement has the source parameters of the weight in place of a weight, so that state dicts keep their names and values.
Writes to them are detected like those to other packed weights (rewrite/weight_edits.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm

from hf_cpu_accel.patching.restore import remove_hook
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.packed_module import PackedModule
from hf_cpu_accel.rewrite.core.packed_source import source

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
_KEPT = "the convolution runs on packed values of its weight; these parameters are kept for state_dict()"


def with_computed_weight(module: nn.Module, path: str, context: Context) -> nn.Module:
    """Return `module`, or a plain convolution in its places with the weight that it computes."""
    places = context.tree.slots[id(module)]
    if id(module) in context.tree.handled or id(module) in context.tree.obstacles or not places:
        return module
    weight = None if context.skipped(path) else _weight_of(module)
    if weight is None:
        return module
    plain = _plain(module, weight)
    context.tree.slots[id(plain)] = places
    context.weights.computed[id(plain)] = plain, module
    saved = source()
    if saved is not None:
        saved.computed = weight
    return plain


def settle(plain: nn.Module, path: str, context: Context) -> Iterator[PlanItem]:
    """Give the replacement of the convolution from `with_computed_weight` the source parameters of the weight, and yield their
    rows. Call it after the rules."""
    _, module = context.weights.computed.get(id(plain), (None, plain))
    if module is plain:
        return
    assert isinstance(plain.weight, nn.Parameter)
    plain.weight.data = torch.empty(0, dtype=plain.weight.dtype)
    saved = source()
    if saved is not None:
        saved.computed = None
    if id(plain) not in context.tree.handled:
        return
    context.tree.handled.update(map(id, module.modules()))
    parent, name = context.tree.slots[id(plain)][0]
    replacement = parent._modules[name]
    if replacement is module:
        return
    if isinstance(replacement, PackedModule):
        replacement.keep_sources(module)
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, WeightNorm):
            remove_hook(context.journal, module._forward_pre_hooks, key)
    for inner, part in module.named_modules():
        if part is not module and part._parameters:
            yield PlanItem.left(f"{path}.{inner}", type(part).__name__, _KEPT)


def _weight_of(module: nn.Module) -> Tensor | None:
    """Return the weight that a convolution computes in each call from other tensors, or None if it computes none or more than
    that."""
    compute = _computation(module) if isinstance(module, _CONVOLUTIONS) else None
    if compute is None or "bias" not in module._parameters:
        return None
    with torch.no_grad():
        weight, again = call_foreign(compute), call_foreign(compute)
    if not isinstance(weight, Tensor) or not isinstance(again, Tensor):
        return None
    return weight.detach() if torch.equal(weight, again) else None


def _computation(module: nn.Module) -> Callable[[], Any] | None:
    hooks: list[Any] = list(module._forward_pre_hooks.values())
    if hooks and isinstance(hooks[0], WeightNorm):
        (norm, *others) = hooks
        alone = norm.name == "weight" and not any(isinstance(hook, WeightNorm) for hook in others)
        return (lambda: norm.compute_weight(module)) if alone and not module._modules else None
    if not parametrize.is_parametrized(module) or list(module._modules) != ["parametrizations"]:
        return None
    made: Any = module.parametrizations
    # With one source tensor torch's `remove_parametrizations` would overwrite it with the packed values.
    alone = list(made) == ["weight"] and not made["weight"].is_tensor
    return (lambda: module.weight) if alone else None


def _plain(module: nn.Module, weight: Tensor) -> nn.Module:
    """Return `module` with its own weight; hooks other than those of weight norm are kept."""
    cls: Any = parametrize.type_before_parametrizations(module)
    plain: nn.Module = cls.__new__(cls)
    vars(plain).update({name: value for name, value in vars(module).items() if name != "weight"})
    hooks = OrderedDict(
        (key, hook) for key, hook in module._forward_pre_hooks.items() if not isinstance(hook, WeightNorm)
    )
    parameter = nn.Parameter(weight, requires_grad=False)
    parameters = {"weight": parameter, "bias": module._parameters["bias"]}
    vars(plain).update(_parameters=parameters, _modules={}, _forward_pre_hooks=hooks)
    return plain
