"""Convert the tensors in arguments and outputs of calls to another dtype."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Container
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

_LARGEST = torch.finfo(torch.float16).max
# Objects of tensors and of these count as values, such as diffusers' distributions of latents.
_PLAIN = (Tensor, bool, int, float, str, type(None))

Convert = Callable[[Tensor], Tensor]


def to_float32(value: Any) -> Any:
    """Return `value` with its float16 tensors as float32; lists, tuples and dictionaries that hold some are copied."""
    return _map(value, torch.float16, Tensor.float, [])


def to_float16(value: Any, kept: Container[str] = ()) -> Any:
    """Return `value` with its float32 tensors as float16, except entries of dictionaries under the names `kept`."""
    return _map(value, torch.float32, _narrow, [], kept)


def _narrow(tensor: Tensor) -> Tensor:
    """Return the tensor as float16. Values too large for it become its largest, since eager float16 has masks of those."""
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-_LARGEST, _LARGEST)).to(torch.float16)


def _map(
    value: Any,
    dtype: torch.dtype,
    convert: Convert,
    done: list[tuple[Tensor, Tensor]],
    kept: Container[str] = (),
) -> Any:
    if isinstance(value, Tensor):
        return value if value.dtype is not dtype else _converted(value, convert, done)
    if isinstance(value, dict | UserDict):
        changed = {}
        for key, part in value.items():  # no comprehension: Dynamo does not follow its cells
            made = part if key in kept else _map(part, dtype, convert, done)
            if made is not part:
                changed[key] = made
        return _with_items(value, changed)
    if isinstance(value, list | tuple):
        parts = [_map(part, dtype, convert, done) for part in value]
        if all(made is part for made, part in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if _is_record(value):
        made = copy.copy(value)
        made.__dict__.update(_map(vars(value), dtype, convert, done))
        return made
    return value


def _converted(tensor: Tensor, convert: Convert, done: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Convert a tensor, and return the same result for a tensor that occurs twice."""
    for before, after in done:  # Dynamo of torch 2.11 knows `is` between tensors, and no id
        if before is tensor:
            return after
    done.append((tensor, convert(tensor)))
    return done[-1][1]


def _with_items(value: Any, changed: dict[Any, Any]) -> Any:
    if not changed:
        return value
    if torch.compiler.is_compiling() and is_dataclass(value) and not isinstance(value, type):
        return replace(value, **changed)  # Dynamo of torch 2.11 records no copy
    made = copy.copy(value)
    for key, part in changed.items():
        made[key] = part  # outputs of transformers and diffusers set their attribute with it
    return made


def _is_record(value: Any) -> bool:
    state: dict[str, Any] = getattr(value, "__dict__", {})
    return (
        bool(state)
        and not isinstance(value, type | nn.Module)
        and all(isinstance(part, _PLAIN) for part in state.values())
        and any(isinstance(part, Tensor) for part in state.values())
    )
