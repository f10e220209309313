"""What is held of one linear whose weight was quantised before it came to us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hf_cpu_accel.packing.affine import AffineGroups


@dataclass(frozen=True)
class StoredWeight:
    """The weight of a linear as its checkpoint has it.

    Attributes:
        form: its name, such as "GGUF Q4_1".
        bits, group: of the affine groups that hold it.
        rows: (first, last) -> these output features; None where no affine groups hold them.
        tensors: those in the module that hold it.
        refusal: why it cannot be packed, or None.
        permutation: int64 [in_features], the input features in the order in which `rows` has them; None: as they are.
        values: (first, last) -> these output features in float32, where `rows` is None.
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
