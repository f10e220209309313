"""Breaks one argument of a good call: its shape, dtype, values, length or place.

Some of what comes out is still good, such as a vector with other strides: judge.py asks the reference.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.ops.fuzz.call import Call, names_of

# None between 2^24 and 2^30: graphs of so many rows are allowed, and are gigabytes.
NUMBERS = (-(2**63), -(2**31), -1000, -1, 0, 1, 3, 1000, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
INDICES = (-(2**31), -1000, -1, 10_000, 2**31 - 1)
DTYPES = (
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.bool),
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.complex64),
)
# Arguments that packing/, decoder/bind.py or convolution_chain.py makes.
PACKED = {
    "weight",
    "scale",
    "qkv",
    "output",
    "up",
    "down",
    "parts",
    "layout",
    "weights",
    "vectors",
    "scalars",
}


def spoiled(call: Call, rng: random.Random) -> Call:
    """The call with one argument changed, or two that have changed places."""
    arguments, names = list(call.arguments), names_of(call.op)
    given = [i for i, argument in enumerate(arguments) if isinstance(argument, Tensor)]
    if len(given) > 1 and rng.random() < 0.1:
        one, other = rng.sample(given, 2)
        arguments[one], arguments[other] = arguments[other], arguments[one]
        return _changed(call, arguments, f"{names[one]} and {names[other]} have changed places", one, other)
    place = rng.choice([i for i, argument in enumerate(arguments) if argument is not None])
    arguments[place], how = _broken(arguments[place], rng)
    return _changed(call, arguments, f"{names[place]} {how}", place)


def _changed(call: Call, arguments: list[Any], how: str, *places: int) -> Call:
    names = names_of(call.op)
    # The weight and bias of norms are plain vectors; those of the other ops are packed, and features of the input that only fill up
    # the last word or group of the weight cannot be told from none.
    packs = not call.op.endswith("norm") and any(_is_packed(name) for name in names)
    resized = 0 in places and arguments[0].shape[-1:] != call.arguments[0].shape[-1:]
    opaque = packs and (resized or any(_is_packed(names[place]) for place in places))
    # 0 * infinity where one side multiplies and the other one does not.
    opaque |= any(isinstance(arguments[i], float) and not math.isfinite(arguments[i]) for i in places)
    return replace(call, arguments=arguments, notes=[*call.notes, how], opaque=call.opaque or opaque)


def _is_packed(name: str) -> bool:
    return name.endswith("_scale") or name in PACKED


def _broken(argument: Any, rng: random.Random) -> tuple[Any, str]:
    if isinstance(argument, Tensor):
        how = rng.choice(_ways(argument))
        return how(argument, rng), how.__name__.strip("_").replace("_", " ")
    if isinstance(argument, list):
        return _broken_list(argument, rng)
    if isinstance(argument, bool):
        return not argument, "is the other one"
    if isinstance(argument, int):
        value = rng.choice((*NUMBERS, argument - 1, argument + 1, 2 * argument, -argument))
        return value, f"is {value} and not {argument}"
    if isinstance(argument, float):
        value = rng.choice((math.nan, math.inf, -math.inf, -argument, 0.0))
        return value, f"is {value}"
    return rng.choice(("", "swish", f"{argument},", f" {argument}")), "is another string"


def _broken_list(argument: list[Any], rng: random.Random) -> tuple[list[Any], str]:
    changed = list(argument)
    way = rng.choice(
        ("one less", "one more", "none", "another order", "one broken", "one broken", "one broken")
    )
    if way == "none" or not changed:
        return [], "is empty"
    place = rng.randrange(len(changed))
    if way == "one less":
        del changed[place]
    elif way == "one more":
        changed.insert(place, changed[rng.randrange(len(changed))])
    elif way == "another order":
        rng.shuffle(changed)
    else:
        changed[place], how = _broken(changed[place], rng)
        return changed, f"[{place}] {how}"
    return changed, f"has {way}"


def _ways(x: Tensor) -> list[Callable[[Tensor, random.Random], Tensor]]:
    ways = [_is_of_another_dtype, _is_of_another_dtype, _has_one_more_dimension, _is_flat, _is_strided]
    if x.dim():
        ways += [_is_shorter, _is_shorter, _is_longer, _is_longer, _is_empty, _lacks_a_dimension]
    if x.dim() > 1:
        ways += [_is_turned, _is_one_row_for_all]
    if x.numel() and x.dtype in (torch.int32, torch.int64):
        ways += [_has_a_number_out_of_range] * 8
    if x.numel() and x.dtype in (torch.float32, torch.bfloat16):
        ways += [_has_a_special_value] * 2
    return ways


def _is_of_another_dtype(x: Tensor, rng: random.Random) -> Tensor:
    return x.to(rng.choice([dtype for dtype in DTYPES if dtype is not x.dtype]))


def _has_one_more_dimension(x: Tensor, rng: random.Random) -> Tensor:
    return x.unsqueeze(rng.randrange(x.dim() + 1))


def _lacks_a_dimension(x: Tensor, rng: random.Random) -> Tensor:
    along = rng.randrange(x.dim())
    return x.select(along, 0) if x.shape[along] else x.sum(along, dtype=x.dtype)


def _is_flat(x: Tensor, rng: random.Random) -> Tensor:
    return x.flatten()


def _is_strided(x: Tensor, rng: random.Random) -> Tensor:
    """Good for what may have any strides."""
    return torch.stack([x, x], dim=-1)[..., 0] if x.dim() else x


def _is_shorter(x: Tensor, rng: random.Random) -> Tensor:
    along = rng.randrange(x.dim())
    return x.narrow(along, 0, x.shape[along] - 1).clone() if x.shape[along] else x.unsqueeze(0)


def _is_longer(x: Tensor, rng: random.Random) -> Tensor:
    along = rng.randrange(x.dim())
    return torch.cat([x, x.narrow(along, 0, 1)], dim=along) if x.shape[along] else x.unsqueeze(0)


def _is_empty(x: Tensor, rng: random.Random) -> Tensor:
    return x.narrow(rng.randrange(x.dim()), 0, 0).clone()


def _is_turned(x: Tensor, rng: random.Random) -> Tensor:
    return x.transpose(*rng.sample(range(x.dim()), 2))


def _is_one_row_for_all(x: Tensor, rng: random.Random) -> Tensor:
    """Strides of 0: good for what may have any."""
    return x[:1].expand(x.shape) if x.shape[0] else x


def _has_a_number_out_of_range(x: Tensor, rng: random.Random) -> Tensor:
    x = x.clone()
    x[_somewhere(x, rng)] = rng.choice(INDICES)
    return x


def _has_a_special_value(x: Tensor, rng: random.Random) -> Tensor:
    x = x.clone()
    x[_somewhere(x, rng)] = rng.choice((math.nan, math.inf, -math.inf, 1e18, 1e-40))
    return x


def _somewhere(x: Tensor, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(size) for size in x.shape)
