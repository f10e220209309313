"""Who watches what passes between modules."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

HOOKS_OF_DIFFUSERS = "_diffusers_hook"  # the attribute of modules that holds their registry
# nn.Module's dictionaries of what is called around a forward.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_GLOBAL = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
_CAPTURE = "transformers.utils.output_capturing"
_HIDDEN_STATES = frozenset(("hidden_states", "_hidden_states_layers"))  # these, and which of them
_KNOWN = (
    _CAPTURE,
    "hf_cpu_accel.rewrite.weight_edits",
    "hf_cpu_accel.rewrite.core.autotune",
    "hf_cpu_accel.rewrite.core.first_call",
)


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The dictionaries of the hooks around the forward of `module`, which change when hooks come and go."""
    return module._forward_hooks, module._forward_pre_hooks


def has_global_hooks() -> bool:
    """Whether something is called around the forwards of all modules there are."""
    return bool(_GLOBAL[0] or _GLOBAL[1])


def share_hooks(original: nn.Module, replacement: nn.Module) -> None:
    """Have what is registered on either of two modules called, whoever holds on to the one that is out of the model."""
    for name in _HOOKS:
        hooks, others = vars(replacement)[name], vars(original)[name]
        if hooks is not others:
            hooks.update(others)
            vars(original)[name] = hooks


def has_foreign_hook(hooks: dict[int, Any]) -> bool:
    """Whether there is a hook besides our own, and those by which transformers collects the outputs that a caller asked for."""
    return any(getattr(hook, "__module__", None) not in _KNOWN for hook in hooks.values())


def instance_forward(module: nn.Module) -> Any:
    """The forward that was set on `module` itself and is not its class's; None if there is none.

    Hooks of diffusers that are taken off leave the class's behind as an attribute. What TorchScript has compiled counts as its own.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return module.forward
    forward = vars(module).get("forward")
    function, owner = (getattr(forward, name, None) for name in ("__func__", "__self__"))
    return None if function is type(module).forward and owner is module else forward


def carried_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of `module` that one in its place is to have: all but those that call `module` itself."""
    return {
        name: value for name, value in vars(module).items() if name not in ("forward", HOOKS_OF_DIFFUSERS)
    }


def move_hooks(source: nn.Module, target: nn.Module) -> None:
    """Hooks of diffusers that were put on `source` go to `target`, which comes in its place, in their order."""
    registry = vars(source).pop(HOOKS_OF_DIFFUSERS, None)
    hooks = dict(getattr(registry, "hooks", {}))
    for name in reversed(hooks):
        registry.remove_hook(name, recurse=False)
    for name, hook in hooks.items():
        type(registry).check_if_exists_or_initialize(target).register_hook(hook, name)


def forget_children(root: nn.Module) -> None:
    """Registries of diffusers remember which modules below them have hooks: let those in `root` look again."""
    for module in root.modules():
        registry: Any = vars(module).get(HOOKS_OF_DIFFUSERS)
        if hasattr(registry, "_child_registries_cache"):
            registry._child_registries_cache = None  # diffusers 0.39 has no function for it


def is_collecting(key: str) -> bool:
    """Whether a caller of the present forward asked transformers for the outputs called `key`."""
    module = sys.modules.get(_CAPTURE)
    collected = None if module is None else module._active_collector.get()
    return collected is not None and key in collected


def is_collecting_inside(*, but_hidden_states: bool = False) -> bool:
    """Whether a caller of the present forward asked transformers for any outputs of modules, by an argument or by the config.

    Args:
        but_hidden_states: those do not count, which layers give themselves.
    """
    module = sys.modules.get(_CAPTURE)
    if module is None:
        return False
    collected = module._active_collector.get()
    if not collected or not but_hidden_states:
        return bool(collected)
    return not _HIDDEN_STATES.issuperset(collected)


def is_plain(module: nn.Module, *, may_collect: bool = False) -> bool:
    """No hooks, no parametrizations, no compiled or overridden forward: replacing it loses nothing.

    Args:
        may_collect: hooks do not count by which transformers collects outputs, for what looks whether it is asked for some.
    """
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    watched = any(map(has_foreign_hook, hooks)) if may_collect else any(hooks)
    if watched or parametrize.is_parametrized(module):
        return False
    return instance_forward(module) is None and module._compiled_call_impl is None
