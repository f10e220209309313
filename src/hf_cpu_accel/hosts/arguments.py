"""Names by which host libraries call what we replace: of attention implementations, and of arguments of layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

NATIVE_ATTENTION = "hf_cpu_accel"  # ours, behind transformers' attention interface
STOCK_ATTENTION = "sdpa"  # the one whose place it takes

# The arguments that take a cache of keys and values: of transformers since 5.24, before that, and of older layers.
CACHES = ("cache", "past_key_values", "layer_past", "past_key_value")
STATES = "cache_params"  # what recurrent mixers called it before 5.24

_OF_METHODS: WeakKeyDictionary[Callable[..., Any], Mapping[str, inspect.Parameter]] = WeakKeyDictionary()


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of `function` by name, as `inspect.signature` has them; those of a method are read once for all instances.

    None of what TorchScript has traced, which has no signature.
    """
    if isinstance(function, torch.ScriptMethod):
        return {}
    method = getattr(function, "__func__", None)
    if method is None:
        return inspect.signature(function).parameters
    if method not in _OF_METHODS:
        _OF_METHODS[method] = inspect.signature(function).parameters
    return _OF_METHODS[method]


def parameter_names(function: Callable[..., Any], *, keyword_only: bool = False) -> tuple[str, ...]:
    """Of the parameters that are given by position, and of those that are given by name only, where they are asked for."""
    parameters = parameters_of(function).values()
    return tuple(
        p.name
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD or (keyword_only and p.kind is p.KEYWORD_ONLY)
    )


def of_own_keys(arguments: dict[str, Any], length: int) -> dict[str, Any]:
    """`arguments` of a call that begins a text, for one without its cache: the masks of static caches have columns for all places.

    Args:
        length: of the hidden states.
    """
    mask = arguments.get("attention_mask")
    if type(mask) is not Tensor or mask.dim() != 4 or mask.shape[3] <= length:
        return arguments
    return {**arguments, "attention_mask": mask[..., :length]}


def cache_argument(function: Callable[..., Any]) -> str | None:
    """The name of the argument of `function` that takes a cache of keys and values; None if there is none."""
    names = parameters_of(function)
    return next((name for name in CACHES if name in names), None)


def with_our_cache_name(names: Collection[str], named: dict[str, Any]) -> dict[str, Any]:
    """`named` arguments of a module with the cache by the name that transformers gives it since 5.24; what else is called so is
    what that module does not look at.

    Args:
        names: of the parameters of its forward.
    """
    own = _cache_name(names)
    if own == CACHES[0]:
        return named
    return _renamed({name: value for name, value in named.items() if name != CACHES[0]}, own, CACHES[0])


def with_its_cache_name(names: Collection[str], named: dict[str, Any]) -> dict[str, Any]:
    """The same the other way round."""
    own = _cache_name(names)
    return named if own == CACHES[0] else _renamed(named, CACHES[0], own)


def takes_cache(names: Collection[str]) -> bool:
    """Whether one of these parameters takes a cache, of keys and values or of states."""
    return any(name in names for name in (*CACHES, STATES))


def _cache_name(names: Collection[str]) -> str:
    return next((name for name in (*CACHES, STATES) if name in names), CACHES[0])


def _renamed(named: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in named.items()}
