"""Facts about modules that decide which code runs in their calls."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

_PACKAGE = "hf_cpu_accel."
# Attributes of every module, and others that no forward reads.
OF_MODULES = frozenset((*vars(nn.Module()), "forward", "_is_hf_initialized", "_hf_cpu_accel_left"))
GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)


def has_global_hooks() -> bool:
    """Return whether there are hooks around the forwards of all modules."""
    return bool(GLOBAL_HOOKS[0] or GLOBAL_HOOKS[1])


def instance_forward(module: nn.Module) -> Any:
    """Return the forward that is set on `module` itself and differs from its class's, or None.

    Hooks of diffusers that were removed leave the class's forward behind as an attribute. A TorchScript module counts as one
    with its own.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return module.forward
    forward = vars(module).get("forward")
    function, owner = (getattr(forward, name, None) for name in ("__func__", "__self__"))
    return None if function is type(module).forward and owner is module else forward


def asks_for_mode(module: nn.Module) -> bool:
    """Return whether the forward of `module` reads its mode; for a dropout, only if its probability is not 0."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    code = getattr(type(module).forward, "__code__", None)
    return (code is None or "training" in code.co_names) and getattr(module, "p", None) != 0


def is_package_class(cls: type) -> bool:
    """Return whether this package defines the class; its modules check their own attributes."""
    return cls.__module__.startswith(_PACKAGE)


def class_of(module: nn.Module) -> type:
    """Return the class of a module, of fused ones the original class."""
    original: type = getattr(type(module), "_original_class", type(module))
    return original


def names_of_package(module: nn.Module) -> frozenset[str]:
    """Return the attributes of every module, and those that a fused class adds to the original class and checks itself."""
    fused: type | None = getattr(type(module), "_fused_class", None)
    return OF_MODULES if fused is None else _names_of(fused)


@cache
def _names_of(fused: type) -> frozenset[str]:
    bases = [base for base in fused.__mro__ if is_package_class(base)]
    names = (name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ())))
    return OF_MODULES.union(names)
