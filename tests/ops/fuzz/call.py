"""A call of an op as its schema has it, and what its result is held to."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Call:
    """A good call.

    Attributes:
        op: its name in `torch.ops.hf_cpu_accel`.
        arguments: all of them, in the order of the schema.
        reference: the op in plain torch, on the same arguments.
        bound: largest difference over the largest value of the reference: that which the tests of the op hold it to.
        least: what that largest value is taken for at least.
        alike: what to do instead of that, for results that may differ from the reference's: raises AssertionError.
        written: the places of arguments that the op writes to.
        notes: what was drawn, and what was broken.
        opaque: a packed weight, its scales, a layout or what they are for was changed, and nobody can see that the numbers do
            not belong together: any answer is good.
        hides: NaN reaches more of the reference's result than of the op's: by what a query does not see, which the reference
            multiplies by 0, or by a tile of a convolution.
    """

    op: str
    arguments: list[Any]
    reference: Callable[..., Any]
    bound: float = 1e-5
    least: float = 1.0
    alike: Callable[[list[Tensor], list[Tensor]], None] | None = None
    written: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)
    opaque: bool = False
    hides: bool = False

    def run(self) -> list[Tensor]:
        return tensors_of(getattr(torch.ops.hf_cpu_accel, self.op)(*self.arguments))

    def expected(self) -> list[Tensor]:
        return tensors_of(self.reference(*self.arguments))

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(_short, self.arguments))}){''.join(f'; {note}' for note in self.notes)}"


# A family: makes one good call of one of its ops.
Family = Callable[[random.Random], Call]


def names_of(op: str) -> list[str]:
    """The names of its arguments."""
    return [argument.name for argument in getattr(torch.ops.hf_cpu_accel, op).default._schema.arguments]


def tensors_of(result: Any) -> list[Tensor]:
    if result is None:  # it only writes to its arguments
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def copied(argument: Any) -> Any:
    """The same in memory of its own, with the strides that it has where it is dense."""
    if isinstance(argument, Tensor):
        return argument.clone()
    return [copied(part) for part in argument] if isinstance(argument, list) else argument


def _short(argument: Any) -> str:
    if isinstance(argument, Tensor):
        apart = "" if argument.is_contiguous() else f" by {argument.stride()}"
        return f"{str(argument.dtype)[6:]}{list(argument.shape)}{apart}"
    if isinstance(argument, list):
        return f"[{', '.join(map(_short, argument))}]"
    return repr(argument)
