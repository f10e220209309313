"""LoRA adapters come, change and go in an accelerated model: each such call is made on the model as it was.

Adapters are put into plain linears and convolutions, and fusing one writes to their weights. Packed weights would be missed by the
former and out of date after the latter, so around such a call the model is restored and accelerated anew. Pipelines of diffusers
change the layers of their models directly, too: `frontends.adapters` has their methods do the same. A pipeline that was made of
models which another one has accelerated has no such methods; for it, text encoders keep plain what adapters are made of and lie
around (`adapter_layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from hf_cpu_accel.patching.journal import add_attribute
from hf_cpu_accel.patching.override import Override
from hf_cpu_accel.rewrite.core.context import Context

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
    """A method that is called on models as they were before they were accelerated.

    Raises:
        RuntimeError: the original weights are gone (`originals="drop"`); the models stay as they are.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.name = name
        super().__init__(owner)

    def models(self) -> Sequence[nn.Module]:
        """Those that the method may change; the accelerated ones among them are restored meanwhile."""
        return (self.model,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method: Callable[..., Any] = self.__wrapped__
        with on_originals(self.models()):
            return method(*args, **kwargs)


def follow_adapters(context: Context) -> None:
    """Have the methods of the root that change adapters called on the original, if it has them."""
    cls = type(context.root)
    takes_adapters = hasattr(cls, _OF_DIFFUSERS) or hasattr(cls, _OF_TRANSFORMERS)
    for name in _METHODS if takes_adapters else ():
        if hasattr(cls, name):
            add_attribute(context.journal, context.root, name, OnTheOriginal(context.root, name))


@contextmanager
def on_originals(models: Sequence[nn.Module]) -> Iterator[None]:
    """`with on_originals(models):` has what is accelerated of them restored on entry, and accelerated anew on exit.

    Raises:
        RuntimeError: the original weights of one are gone (`originals="drop"`); all stay accelerated.
    """
    # Neither knows the other side at import: `api` is on top of this, and what a rewrite leaves behind calls it later.
    from hf_cpu_accel.api import accelerate_roots
    from hf_cpu_accel.hosts.find import find
    from hf_cpu_accel.rewrite.apply import accelerated_parts, acceleration_of, undo

    parts = dict.fromkeys(part for model in models for part in accelerated_parts(model))
    before = [(part, acceleration) for part in parts if (acceleration := acceleration_of(part)) is not None]
    for _, acceleration in before:
        acceleration.journal.check()
    try:
        for part, _ in before:
            undo(part)
        yield
    finally:
        for part, acceleration in before:
            roots = [replace(root, name=acceleration.name) for root in find(part)]
            accelerate_roots(roots, acceleration.config)
