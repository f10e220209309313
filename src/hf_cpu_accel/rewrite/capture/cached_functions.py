"""Functions of a model with a `functools.lru_cache`, whose computation a recorder would not see."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from typing import Any

from torch import nn


def forget_results(layer: nn.Module) -> bool:
    """Clear the caches of functions that the modules in `layer` may call, and return whether one had results."""
    classes = {cls for module in layer.modules() for cls in type(module).__mro__ if not _is_library(cls)}
    modules = {cls.__module__ for cls in classes} & sys.modules.keys()
    held = [value for cls in classes for value in list(vars(cls).values())]
    for name in modules:
        values = list(vars(sys.modules[name]).values())
        held += (value for value in values if getattr(value, "__module__", None) == name)
    functions = {id(function): function for value in held for function in _cached_in(value)}
    remembering = [f for f in functions.values() if f.cache_info().currsize]
    for function in remembering:
        function.cache_clear()
    return bool(remembering)


def _is_library(cls: type) -> bool:
    return cls.__module__.startswith(("torch.", "builtins", "hf_cpu_accel."))


def _cached_in(value: Any) -> Iterator[Any]:
    """Yield `value` if it is a cached function, or those that it calls: decorators of transformers hold one in a cell."""
    function = getattr(value, "__func__", value)  # of static methods, and of those of a class
    cells = getattr(function, "__closure__", None) or ()
    for candidate in (function, *(_content(cell) for cell in cells)):
        if isinstance(candidate, _lru_cache_wrapper):
            yield candidate


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty still
        return None
