"""Names by which host libraries call what we replace: of attention implementations, and of arguments of layers."""

from __future__ import annotations

NATIVE_ATTENTION = "hf_cpu_accel"  # ours, behind transformers' attention interface
STOCK_ATTENTION = "sdpa"  # the one whose place it takes

# The arguments of a layer that take a cache of keys and values.
CACHES = frozenset({"past_key_values", "layer_past", "past_key_value"})
