"""Continuous batching of an accelerated model: the scheduler and paged cache of transformers, with attention of this package
over its pages.

transformers starts a session only for attention implementations that it knows, and checks once, when the manager of the session
is created, so the model reports `sdpa` then. The name that it reports later decides whether transformers creates a mask of all
tokens by all keys for each step: under the name of this package it creates none.
"""

from __future__ import annotations

from typing import Any

from hf_cpu_accel.hosts.arguments import NATIVE_ATTENTION, STOCK_ATTENTION
from hf_cpu_accel.patching.override import Override


class StartSession(Override):
    """`model.init_continuous_batching`, which every session calls."""

    name = "init_continuous_batching"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.config._attn_implementation != NATIVE_ATTENTION:
            return self.__wrapped__(*args, **kwargs)
        self.model.set_attn_implementation(STOCK_ATTENTION)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            self.model.set_attn_implementation(NATIVE_ATTENTION)
