"""What is inside of a fused module, to tell whether something else was put there since it was made."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from operator import contains
from typing import Any

from torch import nn

from hf_cpu_accel.patching.hooks import own_forward
from hf_cpu_accel.patching.modes import asks_for_mode
from hf_cpu_accel.patching.plain_values import is_plain, noted
from hf_cpu_accel.runtime.tracing import constant_while_traced

# What each module has, which is looked at by itself or counts for nothing, and a forward that was set on one before it was fused.
_NOT_TOLD = frozenset((*vars(nn.Module()), "forward"))
_CONTAINERS = (list, dict, set)
_PACKAGE = "hf_cpu_accel."


class Inside:
    """The modules inside of one, and the plain attributes that they are told by.

    A fused forward reads none of these. With an adapter or another norm in the place of a module, a forward set on one, or another
    scale of attention, it is no longer what its class's own would be.

    Args:
        root: the module, in which all is as it was when it was fused.
        by_attributes: whether attributes count.
    """

    def __init__(self, root: nn.Module, *, by_attributes: bool = True) -> None:
        modules = list(root.modules())
        self._modules = [module for module in modules[1:] if own_forward(module) is None]
        self._children = [module._modules for module in modules if module._modules]
        self._fused_children = [dict(children) for children in self._children]
        told = modules if by_attributes else []
        named = [(module, names) for module in told if (names := tuple(_names(module)))]
        self._told = [module for module, _ in named]
        values = [noted(vars(module), names) for module, names in named]
        self._readers, self._values = [read for read, _ in values], [value for _, value in values]
        self._find_states()

    @constant_while_traced
    def has_changed(self) -> bool:
        """Whether it has; while a graph is traced, as of then."""
        if self._children != self._fused_children:
            return True
        # Hooks of diffusers that were taken off leave the class's own there.
        is_set = any(map(contains, self._states, repeat("forward")))
        if is_set and any(own_forward(module) is not None for module in self._modules):
            return True
        try:
            return [read(state) for read, state in self._told_by] != self._values
        except KeyError:
            return True

    def _find_states(self) -> None:
        self._states = [vars(module) for module in self._modules]
        self._told_by = list(zip(self._readers, map(vars, self._told), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_states", "_told_by")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy: its modules have dictionaries of their own."""
        vars(self).update(state)
        self._find_states()


def _names(module: nn.Module) -> Iterator[str]:
    """Those of plain attributes that its class's forward may read, its mode among them; ours look after their own.

    None and empty containers tell nothing: forwards, ours among them, have them where they will keep what they have made.
    """
    if type(module).__module__.startswith(_PACKAGE):
        return
    is_fused = hasattr(type(module), "_original_class")
    if asks_for_mode(module):
        yield "training"
    for name, value in vars(module).items():
        if name in _NOT_TOLD or (is_fused and name.startswith("_")):
            continue
        if is_plain(value) and not (value is None or (isinstance(value, _CONTAINERS) and not value)):
            yield name
