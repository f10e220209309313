"""Layers that adapters of peft lie around, where something happens to them without a call of the model."""

from __future__ import annotations

from torch import nn

_WRAPPED = "base_layer"
_CHANGED = "the pipeline changes its adapter without a call of the model"
_TAKEN_OUT = "the adapter in its weight is switched off, and takes itself out in the next call"


def kept_for_adapters(root: nn.Module, name: str) -> dict[int, str]:
    """Why modules of `root` stay plain, by their ids.

    Args:
        name: what the target calls `root`, if it has several models. Pipelines of diffusers ask those of them that have a
            `fuse_lora`, and go to the adapters in the others themselves.
    """
    changed_from_outside = bool(name) and not hasattr(root, "fuse_lora")
    kept: dict[int, str] = {}
    for adapter in root.modules():
        if _WRAPPED not in adapter._modules or (wrapped := adapter._modules[_WRAPPED]) is None:
            continue
        if changed_from_outside:
            kept.update((id(module), _CHANGED) for module in adapter.modules())
        elif getattr(adapter, "merged", False) and getattr(adapter, "disable_adapters", False):
            kept.update((id(module), _TAKEN_OUT) for module in wrapped.modules())
    return kept
