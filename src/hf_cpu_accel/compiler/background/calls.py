"""The form of a call of a block: its tensors, and a key of everything but sizes that compiled code depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_CONSTANTS = frozenset({type(None), bool, int, float, str, torch.dtype})
Key = tuple[Any, ...]


class NotPlain(Exception):
    """The call cannot be compiled; the message completes "it was called with"."""


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Key, list[Tensor]]:
    """Return the key of a call, and its tensors in order.

    Calls with equal keys have the same nesting, constants, dtypes, ranks and thread count, and sizes of 1 at the same places.
    torch's compilers specialize on a size of 1.

    Raises:
        NotPlain: an argument is not a CPU tensor, a constant, or a tuple, list or dict of those.
    """
    tensors: list[Tensor] = []
    key = (_key(args, tensors), _key(kwargs, tensors), torch.get_num_threads())
    return key, tensors


def _key(value: Any, tensors: list[Tensor]) -> Any:
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if value.device.type != "cpu" or value.layout is not torch.strided:
            raise NotPlain(f"a tensor of layout {value.layout} on {value.device}")
        shape = value.shape
        if 0 in shape:
            raise NotPlain("an empty tensor")
        tensors.append(value)
        return value.dtype, tuple([size if size == 1 else -1 for size in shape])
    if kind in _CONSTANTS:
        return kind, value  # True == 1 == 1.0
    if kind is tuple or kind is list:
        return kind, *[_key(part, tensors) for part in value]
    if kind is dict:
        return kind, *[(name, _key(part, tensors)) for name, part in value.items()]
    raise NotPlain(f"a {kind.__name__}")


def rebuilt(value: Any, tensors: list[Tensor]) -> Any:
    """Return `value` with its tensors replaced by the first ones of `tensors`, which are removed from the list."""
    if isinstance(value, Tensor):
        return tensors.pop(0)
    if isinstance(value, tuple | list):
        return type(value)([rebuilt(part, tensors) for part in value])
    if isinstance(value, dict):
        return {name: rebuilt(part, tensors) for name, part in value.items()}
    return value
