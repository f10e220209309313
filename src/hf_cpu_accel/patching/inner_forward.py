"""A forward of ours beneath the hooks of diffusers, whichever were there first.

Hooks of diffusers (step caches, guidance) put a chain of functions in the place of `module.forward`; the innermost of them calls
what was the module's forward when it came. Ours goes there, so that a hook that skips the module skips ours with it. Hooks that
come later call ours, and may put it back as `module.forward` when they go. So on `restore` ours is taken out where it is still
found, and is the class's own for whoever holds it nevertheless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_cpu_accel.patching.hooks import HOOKS_OF_DIFFUSERS, instance_forward
from hf_cpu_accel.patching.override import Override
from hf_cpu_accel.patching.restore import Journal


class InnerForward(Override):
    """A forward in the place of the class's, until it is switched off.

    Attributes:
        is_on: whether the model is accelerated.
    """

    name = "forward"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.is_on = True


@dataclass(frozen=True)
class PlacedForward:
    """`forward` is what is called for the class's forward of `module`."""

    module: nn.Module
    forward: InnerForward

    def undo(self) -> None:
        self.forward.is_on = False
        if vars(self.module).get("forward") is self.forward:
            del self.module.forward
        for link in _chain(self.module):
            for name in ("original_forward", "forward"):
                if getattr(link, name) is self.forward:
                    setattr(link, name, self.forward.__wrapped__)


def put_inside(journal: Journal, module: nn.Module, forward: InnerForward) -> None:
    """Have `forward` called for the class's forward of `module`, which `has_place`."""
    place = _place(module)
    assert place is not None
    journal.record(PlacedForward(module, forward))
    setattr(*place, forward)


def has_place(module: nn.Module) -> bool:
    """Whether what is called for `module` comes down to the forward of its class through hooks that are known."""
    return _place(module) is not None


def _place(module: nn.Module) -> tuple[Any, str] | None:
    """What holds the forward of the class, under which name."""
    chain = _chain(module)
    if not chain:
        return (module, "forward") if _is_the_class_s(instance_forward(module), module) else None
    # A hook that calls the forward itself has it as the original one, but as the other one where an inner hook was taken off.
    for name in ("forward", "original_forward"):
        held = getattr(chain[0], name)
        if held is not None and _is_the_class_s(held, module):
            return chain[0], name
    return None


def _is_the_class_s(forward: Any, module: nn.Module) -> bool:
    if isinstance(forward, InnerForward):
        return forward.model is module and not forward.is_on
    function = getattr(forward, "__func__", None)  # none of what TorchScript has compiled
    return forward is None or (function is not None and function is type(module).forward)


def _chain(module: nn.Module) -> list[Any]:
    """The links of the hooks, from the inner to the outer; none if there are no hooks, or not as we know them."""
    links = getattr(vars(module).get(HOOKS_OF_DIFFUSERS), "_fn_refs", [])
    return (
        links if all(hasattr(link, "original_forward") and hasattr(link, "forward") for link in links) else []
    )
