"""The weight of one linear of a quantized checkpoint."""

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
    """The weight of a linear of a quantized checkpoint.

    Attributes:
        form: the name of the format, such as "GGUF Q4_1".
        out_features, in_features: of the linear.
        bits, group: of its affine groups.
        rows: (first, last) -> these output features as affine groups, exact or the nearest; None if it is packed in the config's
            dtype.
        tensors: the tensors of the module that store it.
        refusal: why it cannot be packed, or None.
        permutation: int64 [in_features], the order of the input features in `rows`, or None for the original order.
        values: (first, last) -> these output features in float32, if `rows` is None or rounds; None if `rows` is exact.
        agreement: the tolerance between the host's own forward and the product with this weight, as a name of `Tolerance`: "int8"
            if the host rounds activations, "bfloat16" if it computes in half precision.
        reference: computes the host's output for an input if its forward must not be called; None for its forward.
        meant_for: the dtype in which the host multiplies, used for `dtype="auto"`; None as for weights in floating point.
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
    """Yield `tensor`, or the inner tensors of a wrapper subclass (weights of torchao and quanto, the local part of a DTensor)."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for inner in (getattr(tensor, name) for name in names):
        if isinstance(inner, Tensor):
            yield from plain_tensors(inner)


def is_stand_in(tensor: Tensor) -> bool:
    """Return whether `tensor` is a wrapper subclass, without memory of its own."""
    return is_traceable_wrapper_subclass(tensor)


def integers_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the plain tensors of `tensor` with numbers of 8 bits or less, or several of them packed in one."""
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
