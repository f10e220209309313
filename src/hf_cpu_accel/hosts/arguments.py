"""Names in host libraries: of attention implementations, and of arguments of layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

NATIVE_ATTENTION = "hf_cpu_accel"  # of this package, in transformers' attention interface
STOCK_ATTENTION = "sdpa"  # the implementation that it replaces

# The names of the argument for a KV cache: of transformers since 5.24, before that, and of older layers.
CACHES = ("cache", "past_key_values", "layer_past", "past_key_value")
STATES = "cache_params"  # its name in recurrent mixers before 5.24

_OF_METHODS: WeakKeyDictionary[Callable[..., Any], Mapping[str, inspect.Parameter]] = WeakKeyDictionary()


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of `function` by name, from `inspect.signature`; cached for methods.

    Empty for functions of TorchScript, which have no signature.
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
    """Return the names of positional parameters, and with `keyword_only` of keyword-only ones too."""
    parameters = parameters_of(function).values()
    return tuple(
        p.name
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD or (keyword_only and p.kind is p.KEYWORD_ONLY)
    )


def of_own_keys(arguments: dict[str, Any], length: int) -> dict[str, Any]:
    """Return the arguments of a first call for a call without its cache: masks of static caches have columns for all positions.

    Args:
        arguments: of the call.
        length: of the hidden states.
    """
    mask = arguments.get("attention_mask")
    if type(mask) is not Tensor or mask.dim() != 4 or mask.shape[3] <= length:
        return arguments
    return {**arguments, "attention_mask": mask[..., :length]}


def cache_argument(function: Callable[..., Any]) -> str | None:
    """Return the name of the argument of `function` for a KV cache; None if there is none."""
    names = parameters_of(function)
    return next((name for name in CACHES if name in names), None)


def with_our_cache_name(names: Collection[str], named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the cache under its name since transformers 5.24.

    Another argument of that name is dropped, because the module ignores it.

    Args:
        names: of the parameters of the module's forward.
        named: the arguments by name.
    """
    cache_name = _cache_name(names)
    if cache_name == CACHES[0]:
        return named
    others = {name: value for name, value in named.items() if name != CACHES[0]}
    return _renamed(others, cache_name, CACHES[0])


def with_its_cache_name(names: Collection[str], named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the cache under its name in the module."""
    cache_name = _cache_name(names)
    return named if cache_name == CACHES[0] else _renamed(named, CACHES[0], cache_name)


def takes_cache(names: Collection[str]) -> bool:
    """Return whether one of these parameters is a cache, of keys and values or of states."""
    return any(name in names for name in (*CACHES, STATES))


def _cache_name(names: Collection[str]) -> str:
    return next((name for name in (*CACHES, STATES) if name in names), CACHES[0])


def _renamed(named: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in named.items()}
