"""Layers inside peft adapters that code changes without a call of the model."""

from __future__ import annotations

from torch import nn

_WRAPPED = "base_layer"
_CHANGED = "the pipeline changes its adapter directly"
_UNMERGES = "its merged adapter is disabled, and the next call unmerges it"


def kept_for_adapters(root: nn.Module, name: str) -> dict[int, str]:
    """Return {id of a module: why it is not replaced} for modules of `root`.

    Args:
        root: the model.
        name: the name of `root` in a target with several models. Pipelines of diffusers call `fuse_lora` of models that have it,
            and change the adapters of the others directly.
    """
    changed_from_outside = bool(name) and not hasattr(root, "fuse_lora")
    kept: dict[int, str] = {}
    for adapter in root.modules():
        if _WRAPPED not in adapter._modules or (wrapped := adapter._modules[_WRAPPED]) is None:
            continue
        if changed_from_outside:
            kept.update((id(module), _CHANGED) for module in adapter.modules())
        elif getattr(adapter, "merged", False) and getattr(adapter, "disable_adapters", False):
            kept.update((id(module), _UNMERGES) for module in wrapped.modules())
    return kept
