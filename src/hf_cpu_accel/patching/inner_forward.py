"""Replace a forward below the hooks of diffusers, in whichever order the two were installed.

Hooks of diffusers (step caches, guidance) replace `module.forward` by a chain of functions; the innermost one calls the earlier
forward of the module. The forward of this package goes there, so that a hook that skips the module skips it, too. Hooks that
come later call it, and may set it as `module.forward` again when they are removed. So `restore` removes it where it is still
found, and it acts as the class's forward for other holders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_cpu_accel.guard.modules import instance_forward
from hf_cpu_accel.patching.hooks import HOOKS_OF_DIFFUSERS
from hf_cpu_accel.patching.override import Override
from hf_cpu_accel.patching.restore import Journal


class InnerForward(Override):
    """A forward that replaces the class's forward until it is switched off.

    Attributes:
        is_on: whether the model is accelerated.
    """

    name = "forward"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.is_on = True


@dataclass(frozen=True)
class PlacedForward:
    """A change in the journal: `forward` is called instead of the class's forward of `module`."""

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
    """Call `forward` instead of the class's forward of `module`, for which `has_place` holds."""
    place = _place(module)
    assert place is not None
    journal.record(PlacedForward(module, forward))
    setattr(*place, forward)


def has_place(module: nn.Module) -> bool:
    """Return whether calls of `module` reach the forward of its class, directly or through known hooks."""
    return _place(module) is not None


def _place(module: nn.Module) -> tuple[Any, str] | None:
    """Return the object that holds the forward of the class, and its attribute name."""
    chain = _chain(module)
    if not chain:
        return (module, "forward") if _is_the_class_s(instance_forward(module), module) else None
    # A hook that calls the forward itself has it as `original_forward`, or as `forward` after an inner hook was removed.
    for name in ("forward", "original_forward"):
        held = getattr(chain[0], name)
        if held is not None and _is_the_class_s(held, module):
            return chain[0], name
    return None


def _is_the_class_s(forward: Any, module: nn.Module) -> bool:
    if isinstance(forward, InnerForward):
        return forward.model is module and not forward.is_on
    function = getattr(forward, "__func__", None)  # None for TorchScript methods
    return forward is None or (function is not None and function is type(module).forward)


def _chain(module: nn.Module) -> list[Any]:
    """Return the links of the hooks from the inner to the outer one; empty without hooks, or with unknown ones."""
    links = getattr(vars(module).get(HOOKS_OF_DIFFUSERS), "_fn_refs", [])
    return (
        links if all(hasattr(link, "original_forward") and hasattr(link, "forward") for link in links) else []
    )
