"""Continuous batching of an accelerated model: transformers' scheduler and paged cache, over packed weights.

Its attention reads keys from pages, and transformers accepts only implementations which it knows to do so. So the model goes
back to `sdpa` for as long as such a session lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_cpu_accel.generate.override import Override
from hf_cpu_accel.rewrite.attention_interface import NAME, REPLACED


class StartSession(Override):
    """`model.init_continuous_batching`, which all ways into it go through."""

    name = "init_continuous_batching"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.config._attn_implementation == NAME:
            self.model.set_attn_implementation(REPLACED)
        return self.__wrapped__(*args, **kwargs)


class Session(Override):
    """`model.continuous_batching_context_manager`: afterwards our attention is back."""

    name = "continuous_batching_context_manager"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._session(*args, **kwargs)

    @contextmanager
    def _session(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        before = self.model.config._attn_implementation
        try:
            with self.__wrapped__(*args, **kwargs) as manager:
                yield manager
        finally:
            if before == NAME:
                self.model.set_attn_implementation(NAME)
