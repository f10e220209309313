"""What is held of one linear whose weight was quantized before it came to us."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_cpu_accel.packing.affine import AffineGroups


@dataclass(frozen=True)
class StoredWeight:
    """The weight of a linear as its checkpoint has it.

    Attributes:
        form: its name, such as "GGUF Q4_1".
        bits, group: of the affine groups that hold it.
        rows: (first, last) -> these output features, as near as affine groups come to them; None where they are packed in the dtype
            that is asked for.
        tensors: those in the module that hold it.
        refusal: why it cannot be packed, or None.
        permutation: int64 [in_features], the input features in the order in which `rows` has them; None: as they are.
        values: (first, last) -> these output features in float32, where `rows` is None or rounds; None where it is exact.
        agreement: how near the host's own forward is to the product with that weight, as a name of `Tolerance`: "int8" where it
            rounds activations, "bfloat16" where it computes in half precision.
        reference: what the host computes of an input, where its forward is not to be called for it; None: its forward.
        meant_for: the dtype in which the host multiplies, which `dtype="auto"` is then; None: as for weights in floating point.
    """

    form: str
    out_features: int
    in_features: int
    bits: int
    group: int
    rows: Callable[[int, int], AffineGroups] | None
    tensors: tuple[Tensor, ...]
    refusal: str | None = None
    permutation: Tensor | None = None
    values: Callable[[int, int], Tensor] | None = None
    agreement: str = "float32"
    reference: Callable[[Tensor], Tensor] | None = None
    meant_for: str | None = None


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """`tensor`, or those that a subclass which only stands for others is made of (torchao's and quanto's weights, and what this
    process has of a DTensor)."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for held in (getattr(tensor, name) for name in names):
        if isinstance(held, Tensor):
            yield from plain_tensors(held)


def is_stand_in(tensor: Tensor) -> bool:
    """Whether it is such a subclass, with no memory of its own."""
    return is_traceable_wrapper_subclass(tensor)


def integers_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Of its plain tensors those that hold numbers of 8 bits or less, or several of them in one."""
    return tuple(t for t in plain_tensors(tensor) if not t.is_floating_point() or t.itemsize == 1)


def holding_group(group: int, columns: int) -> int | None:
    """The largest group of `AffineGroups` for a weight with a scale for every `group` input features; None if there is none.

    Scales may run on from one row to the next where `group` does not divide `columns`.
    """
    if group == columns:
        return max(64, -(-columns // 64) * 64)
    if columns % group:
        group = math.gcd(group, columns)
    if group not in (16, 32) and group % 64:
        group = math.gcd(group, 64)
    return group if group >= 16 else None


def spread(values: Tensor, group: int, first: int, last: int, columns: int, holding: int) -> Tensor:
    """Numbers for every `group` elements of a weight [N, columns], row by row, as float32 [last - first, groups of `holding`].

    Args:
        values: flat, one for each group of the whole weight, or a single one for all.
    """
    per_row = -(-columns // holding)
    if values.numel() == 1:
        return values.float().reshape(1, 1).expand(last - first, per_row)
    starts = torch.arange(first, last)[:, None] * columns + torch.arange(per_row) * holding
    return values.reshape(-1)[starts // group].float()
