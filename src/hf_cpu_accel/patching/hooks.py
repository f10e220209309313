"""Find hooks and forwards that watch or change the calls of modules."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from hf_cpu_accel.guard.modules import instance_forward
from hf_cpu_accel.hosts.output_capturing import is_collector

HOOKS_OF_DIFFUSERS = "_diffusers_hook"  # the attribute of modules that holds their registry
# Dictionaries of nn.Module with the hooks around a forward.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class PackageHook:
    """Base class of the hooks of this package, and of objects whose methods are hooks. Fused modules ignore them."""


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries of the hooks around the forward of `module`, which change when hooks are added or removed."""
    return module._forward_hooks, module._forward_pre_hooks


def share_hooks(original: nn.Module, replacement: nn.Module) -> None:
    """Share the hooks of two modules, so that both call those registered on either, even on the one outside of the model."""
    for name in _HOOKS:
        hooks, others = vars(replacement)[name], vars(original)[name]
        if hooks is not others:
            hooks.update(others)
            vars(original)[name] = hooks


def has_foreign_hook(hooks: dict[int, Any]) -> bool:
    """Return whether there is a hook other than those of this package and those by which transformers collects outputs for a
    caller."""
    return not all(
        isinstance(getattr(hook, "__self__", hook), PackageHook) or is_collector(hook)
        for hook in hooks.values()
    )


def carried_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of `module` for its replacement: all except those that call `module` itself."""
    return {
        name: value for name, value in vars(module).items() if name not in ("forward", HOOKS_OF_DIFFUSERS)
    }


def move_hooks(source: nn.Module, target: nn.Module) -> None:
    """Move hooks of diffusers from `source` to its replacement `target`, in their order."""
    registry = vars(source).pop(HOOKS_OF_DIFFUSERS, None)
    hooks = dict(getattr(registry, "hooks", {}))
    for name in reversed(hooks):
        registry.remove_hook(name, recurse=False)
    for name, hook in hooks.items():
        type(registry).check_if_exists_or_initialize(target).register_hook(hook, name)


def forget_children(root: nn.Module) -> None:
    """Make registries of diffusers in `root` search again for modules with hooks below them."""
    for module in root.modules():
        registry: Any = vars(module).get(HOOKS_OF_DIFFUSERS)
        if hasattr(registry, "_child_registries_cache"):
            registry._child_registries_cache = None  # diffusers 0.39 has no function for it


def is_plain(module: nn.Module, *, may_collect: bool = False) -> bool:
    """Return whether a module has no hooks, no parametrizations and no compiled or replaced forward, so that replacing it loses
    nothing.

    Args:
        may_collect: whether to ignore hooks by which transformers collects outputs, for modules that check whether it does.
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
