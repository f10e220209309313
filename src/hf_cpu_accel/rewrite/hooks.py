"""Who watches what passes between modules."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_CAPTURE = "transformers.utils.output_capturing"


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The dictionaries of the hooks around the forward of `module`, which change when hooks come and go."""
    return module._forward_hooks, module._forward_pre_hooks


def has_foreign_hook(hooks: dict[int, Any]) -> bool:
    """Whether there is a hook besides those by which transformers collects the outputs that a caller asked for."""
    return any(getattr(hook, "__module__", None) != _CAPTURE for hook in hooks.values())


def is_collecting(key: str) -> bool:
    """Whether a caller of the present forward asked transformers for the outputs called `key`."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # another version: better too careful than wrong
        return True
    collected = _active_collector.get()
    return collected is not None and key in collected


def is_collecting_inside() -> bool:
    """Whether a caller of the present forward asked transformers for any outputs of modules."""
    module = sys.modules.get(_CAPTURE)
    if module is None:
        return False
    collected = module._active_collector.get()
    return bool(collected)
