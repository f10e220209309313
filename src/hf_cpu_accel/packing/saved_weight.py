"""A packed weight in a file, with the parameters that it was packed from and the rule that packed it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_cpu_accel.packing.linear import PANEL_FEATURES, PackedWeight


@dataclass(frozen=True, eq=False)
class SavedWeight:
    """A packed weight in a file.

    Attributes:
        rule: the name of the rule that packed it (`rewrite/registry.py`).
        parameters: the paths of its parameters, in order (query, key and value are one packed weight).
        packed: the packed weight. For a convolution that oneDNN computes, the plain weight with the norm folded in.
        lost: rows of a convolution's weight that its norm multiplies by 0, which `packed` therefore lacks; or None.
        permutation: int64 [in_features], the order of the input features in `packed`; or None.
    """

    rule: str
    parameters: tuple[str, ...]
    packed: PackedWeight
    lost: Tensor | None = None
    permutation: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return {name in the file: tensor}."""
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
    """Check a packed weight from a file, because the kernels do not check its sizes.

    Raises:
        ValueError: the sizes do not match, or a scale is not finite.
    """
    data, scale = packed.data, packed.scale
    rows, columns = packed.out_features, packed.in_features
    bits = re.search(r"\d+", packed.dtype)
    if bits is None or rows <= 0 or columns <= 0:
        raise ValueError(f"dtype={packed.dtype!r}, {rows} x {columns} features: not a valid packed weight")
    # A plain weight for oneDNN.
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
    """Raise ValueError unless it is None or a permutation of the input features."""
    if permutation is None:
        return
    if permutation.dtype is not torch.int64 or permutation.shape != (in_features,):
        raise ValueError(
            f"a permutation of dtype {permutation.dtype} and shape {tuple(permutation.shape)} does not fit {in_features} features"
        )
    if not torch.equal(permutation.sort().values, torch.arange(in_features)):
        raise ValueError(f"a permutation does not contain each of {in_features} features once")
