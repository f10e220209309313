"""Continuous batching of an accelerated model: transformers' scheduler and paged cache, with our attention over its pages.

transformers starts such a session only for attention implementations that it knows, and asks once, when the session's manager
is made: so the model says `sdpa` then. What it says later decides whether transformers makes a mask of all tokens by all keys for
each step: under our name it makes none.
"""

from __future__ import annotations

from typing import Any

from hf_cpu_accel.hosts.arguments import NATIVE_ATTENTION, STOCK_ATTENTION
from hf_cpu_accel.patching.override import Override


class StartSession(Override):
    """`model.init_continuous_batching`, which all ways into it go through."""

    name = "init_continuous_batching"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.config._attn_implementation != NATIVE_ATTENTION:
            return self.__wrapped__(*args, **kwargs)
        self.model.set_attn_implementation(STOCK_ATTENTION)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            self.model.set_attn_implementation(NATIVE_ATTENTION)
