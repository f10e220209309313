"""LoRA adapters come, change and go in an accelerated model: each such call is made on the model as it was.

Adapters are put into plain linears and convolutions, and fusing one writes to their weights. Packed weights would be missed by the
former and out of date after the latter, so around such a call the model is restored and accelerated anew. Pipelines of diffusers
fuse into their text encoders without asking them: there, layers that adapters lie around stay plain (`is_fused_from_outside`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hf_cpu_accel.generate.override import Override
from hf_cpu_accel.rewrite.changes import add_attribute
from hf_cpu_accel.rewrite.context import Context

_OF_DIFFUSERS = "load_lora_adapter"
_OF_TRANSFORMERS = "load_adapter"
_METHODS = (
    _OF_DIFFUSERS,
    _OF_TRANSFORMERS,
    "add_adapter",
    "set_adapter",
    "set_adapters",
    "enable_adapters",
    "disable_adapters",
    "delete_adapter",
    "delete_adapters",
    "enable_lora",
    "disable_lora",
    "fuse_lora",
    "unfuse_lora",
    "unload_lora",
)


class OnTheOriginal(Override):
    """A method of a model that is called on the model as it was before it was accelerated.

    Raises:
        RuntimeError: the original weights are gone (`originals="drop"`); the model stays as it is.
    """

    def __init__(self, name: str, context: Context) -> None:
        self.name = name
        self.component = context.name
        self.config = context.config
        super().__init__(context.root)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from hf_cpu_accel.api import accelerate_roots, restore
        from hf_cpu_accel.frontends.find import find

        method: Callable[..., Any] = self.__wrapped__
        restore(self.model)
        try:
            return method(*args, **kwargs)
        finally:
            roots = [replace(root, name=self.component) for root in find(self.model)]
            accelerate_roots(roots, self.config)


def follow_adapters(context: Context) -> None:
    """Have the methods of the root that change adapters called on the original, if it has them."""
    cls = type(context.root)
    takes_adapters = hasattr(cls, _OF_DIFFUSERS) or hasattr(cls, _OF_TRANSFORMERS)
    for name in _METHODS if takes_adapters else ():
        if hasattr(cls, name):
            add_attribute(context.journal, context.root, name, OnTheOriginal(name, context))
