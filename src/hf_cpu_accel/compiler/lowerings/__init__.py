"""Lowerings of the ops for Inductor: generated code around a function of the library (`products.py`). Other ops are called
directly.

They apply to graphs of this backend only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from hf_cpu_accel import extension


@contextmanager
def in_use() -> Iterator[None]:
    """Inside, Inductor uses the lowerings."""
    from hf_cpu_accel.compiler.torch_private import templates

    _register()
    with templates.lowerings_in_use():
        yield


@lru_cache(maxsize=1)
def _register() -> None:
    from hf_cpu_accel.compiler.lowerings import products

    if extension.status().loaded:
        products.register()
