"""A packed weight on its way into a file and back: with the parameters that it was made of, and who made it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_cpu_accel.packing.linear import PANEL_FEATURES, PackedWeight


@dataclass(frozen=True, eq=False)
class SavedWeight:
    """
    Attributes:
        rule: the name of the rule that packed it (`rewrite/registry.py`).
        parameters: the paths of the parameters that are in it, in their order (query, key and value are one packed weight).
        packed: the packed weight. Of a convolution that oneDNN computes it is the plain weight, with the norm in it.
        lost: rows of a convolution's weight that its norm multiplies by nothing, so that `packed` does not have them; or None.
        permutation: int64 [in_features], the input features in the order in which `packed` has them; or None.
    """

    rule: str
    parameters: tuple[str, ...]
    packed: PackedWeight
    lost: Tensor | None = None
    permutation: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """{name in the file: tensor}."""
        first = self.parameters[0]
        found = {f"{first}.packed": self.packed.data}
        if self.packed.scale is not None:
            found[f"{first}.packed_scale"] = self.packed.scale
        if self.lost is not None:
            found[f"{first}.packed_lost"] = self.lost
        if self.permutation is not None:
            found[f"{first}.packed_permutation"] = self.permutation
        return found


def check_packed(packed: PackedWeight) -> None:
    """Whether a packed weight that was read is one that kernels may read: they trust its sizes.

    Raises:
        ValueError: sizes that do not belong together, or scales that no packing gives.
    """
    data, scale = packed.data, packed.scale
    rows, columns = packed.out_features, packed.in_features
    bits = re.search(r"\d+", packed.dtype)
    if bits is None or rows <= 0 or columns <= 0:
        raise ValueError(f"dtype={packed.dtype!r}, {rows} x {columns} features: not a valid packed weight")
    # For oneDNN, which a panel of one feature is not.
    plain = data.dim() > 2 and data.dtype.is_floating_point and data.shape[0] == rows
    panels = -(-rows // PANEL_FEATURES)
    needed = panels * PANEL_FEATURES * columns * int(bits.group())
    enough = data.dim() > 2 and data.shape[0] == panels and data.nbytes * 8 >= needed
    if not enough and not (plain and data[0].numel() == columns):
        raise ValueError(
            f"data of shape {tuple(data.shape)} is not a {packed.dtype} weight of {rows} x {columns}"
        )
    if scale is None:
        return
    if scale.dtype is not torch.float32 or scale.dim() < 2 or scale.shape[-1] != rows:
        raise ValueError(
            f"scale of dtype {scale.dtype} and shape {tuple(scale.shape)} does not fit {rows} output features"
        )
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("scale contains NaN or infinity")


def check_permutation(permutation: Tensor | None, in_features: int) -> None:
    """
    Raises:
        ValueError: it is no order of so many input features.
    """
    if permutation is None:
        return
    if permutation.dtype is not torch.int64 or permutation.shape != (in_features,):
        raise ValueError(
            f"a permutation of dtype {permutation.dtype} and shape {tuple(permutation.shape)} does not fit {in_features} features"
        )
    if not torch.equal(permutation.sort().values, torch.arange(in_features)):
        raise ValueError(f"a permutation does not contain each of {in_features} features once")
