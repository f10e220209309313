"""Adapters of diffusers pipelines, whose methods load, fuse and remove them in the layers of their models.

The accelerated pipeline gets attributes that call these methods on the original models: all models are restored, the method runs,
    and
all models are accelerated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_cpu_accel.lifecycle import OnTheOriginal

_METHODS = (
    "load_lora_weights",
    "unload_lora_weights",
    "fuse_lora",
    "unfuse_lora",
    "set_adapters",
    "enable_lora",
    "disable_lora",
    "delete_adapters",
)


class PipelineMethod(OnTheOriginal):
    """A method of a pipeline that runs on the original models that support adapters."""

    def models(self) -> Sequence[nn.Module]:
        """Return the models of the pipeline that support adapters."""
        components = (getattr(self.model, name, None) for name in self.model._lora_loadable_modules)
        return [component for component in components if isinstance(component, nn.Module)]


def follow_pipeline(target: Any) -> None:
    """Make the adapter methods of `target` run on the original models, if it is a pipeline with adapters."""
    if not hasattr(type(target), "_lora_loadable_modules"):
        return
    for name in _METHODS:
        if hasattr(type(target), name) and name not in vars(target):
            setattr(target, name, PipelineMethod(target, name))


def leave_pipeline(target: Any) -> None:
    """Remove the attributes, so that the methods of the class run again."""
    for name in _METHODS:
        if isinstance(getattr(target, "__dict__", {}).get(name), PipelineMethod):
            delattr(target, name)
