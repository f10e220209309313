"""LoRA adapters come, change and go in an accelerated model: each such call is made on the model as it was.

Adapters are put into plain linears and convolutions, and fusing one writes to their weights. Packed weights would be missed by the
former and out of date after the latter, so around such a call the model is restored and accelerated anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_cpu_accel.frontends.find import Root
from hf_cpu_accel.generate.override import Override
from hf_cpu_accel.rewrite.changes import add_attribute
from hf_cpu_accel.rewrite.context import Context

_MARK = "load_lora_adapter"  # diffusers' models that take adapters have it
_METHODS = (
    _MARK,
    "add_adapter",
    "set_adapter",
    "set_adapters",
    "enable_adapters",
    "disable_adapters",
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

        method: Callable[..., Any] = self.__wrapped__
        restore(self.model)
        try:
            return method(*args, **kwargs)
        finally:
            accelerate_roots((Root(self.model, "diffusers", (self.model,), self.component),), self.config)


def follow_adapters(context: Context) -> None:
    """Have the methods of the root that change adapters called on the original, if it has them."""
    cls = type(context.root)
    for name in _METHODS if hasattr(cls, _MARK) else ():
        if hasattr(cls, name):
            add_attribute(context.journal, context.root, name, OnTheOriginal(name, context))
