"""Pipelines of diffusers whose methods load, fuse and take out adapters in the layers of their models.

The methods become attributes of the accelerated pipeline that call the class's on the original models: all of them are restored,
the method does what it does, and all are accelerated anew, once.
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


class OfThePipeline(OnTheOriginal):
    """A method of a pipeline that is called while the models which take adapters are as they were."""

    def models(self) -> Sequence[nn.Module]:
        components = (getattr(self.model, name, None) for name in self.model._lora_loadable_modules)
        return [component for component in components if isinstance(component, nn.Module)]


def follow_pipeline(target: Any) -> None:
    """Have the methods of `target` that change adapters called on the originals, if it is a pipeline that has them."""
    if not hasattr(type(target), "_lora_loadable_modules"):
        return
    for name in _METHODS:
        if hasattr(type(target), name) and name not in vars(target):
            setattr(target, name, OfThePipeline(target, name))


def leave_pipeline(target: Any) -> None:
    """The methods are those of the class again."""
    for name in _METHODS:
        if isinstance(getattr(target, "__dict__", {}).get(name), OfThePipeline):
            delattr(target, name)
