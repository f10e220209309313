"""The outputs of modules that callers ask transformers for (`output_hidden_states`, `output_attentions`), collected by hooks."""

from __future__ import annotations

import sys
from typing import Any

_MODULE = "transformers.utils.output_capturing"
_HIDDEN_STATES = frozenset(
    ("hidden_states", "_hidden_states_layers")
)  # hidden states, and the selected layers


def is_collector(hook: Any) -> bool:
    """Return whether transformers collects outputs by this hook."""
    return getattr(hook, "__module__", None) == _MODULE


def is_collecting(key: str) -> bool:
    """Return whether a caller of the current forward asked transformers for the outputs called `key`."""
    collected = _collected()
    return collected is not None and key in collected


def is_collecting_inside(*, but_hidden_states: bool = False) -> bool:
    """Return whether a caller of the current forward asked transformers for any outputs of modules, by an argument or by the
    config.

    Args:
        but_hidden_states: whether to ignore hidden states, which layers return themselves.
    """
    collected = _collected()
    if not collected or not but_hidden_states:
        return bool(collected)
    return not _HIDDEN_STATES.issuperset(collected)


def _collected() -> Any:
    """Return the outputs that are collected in the current forward by key, or None."""
    module = sys.modules.get(_MODULE)
    return None if module is None else module._active_collector.get()
