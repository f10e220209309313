"""Names by which host libraries call what we replace: of attention implementations, and of arguments of layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

NATIVE_ATTENTION = "hf_cpu_accel"  # ours, behind transformers' attention interface
STOCK_ATTENTION = "sdpa"  # the one whose place it takes

# The arguments that take a cache of keys and values: of transformers since 5.24, before that, and of older layers.
CACHES = ("cache", "past_key_values", "layer_past", "past_key_value")


def cache_argument(function: Callable[..., Any]) -> str | None:
    """The name of the argument of `function` that takes a cache of keys and values; None if there is none."""
    names = inspect.signature(function).parameters
    return next((name for name in CACHES if name in names), None)
