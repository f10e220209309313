"""Weights in the order in which the kernels read them: plain strided tensors plus a small header.

A weight [N, K] becomes panels of 32 output features. Inside a panel the weights of one "word" of input features (4 bytes: one
float32, two bfloat16 or four int8 values) stand side by side for the 32 features, so that the kernel streams it front to back:

    data[panel, k_word, feature in panel, value in word]        shape [ceil(N/32), ceil(K/per_word), 32, per_word]

The layout is the same for every instruction-set tier and thread count: a packed weight can be saved on one machine and used on
another. Padding is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .rotation import rotate, rotate_back

PANEL_FEATURES = 32
VALUES_PER_WORD = {"float32": 1, "bfloat16": 2, "int8": 4}
_ROTATED_VALUES = 1 << 18  # 1 MB of float32 at a time
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight of a linear layer.

    Attributes:
        data: [ceil(out_features/32), ceil(in_features/per_word), 32, per_word], float32, bfloat16 or int8.
        scale: int8 only, float32 [2, out_features]: row 0 the scale of each output feature, row 1 the sum of its quantised
            weights (which takes the input's zero point out again); None otherwise. int8 values are those of the rotated weight.
        in_features, out_features: K and N of the original weight.
        dtype: "float32", "bfloat16" or "int8".
    """

    data: Tensor
    scale: Tensor | None
    in_features: int
    out_features: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (self.scale.nbytes if self.scale is not None else 0)

    def narrow(self, start: int, length: int) -> PackedWeight:
        """The output features [start, start + length) as a view.

        Raises:
            ValueError: if start is not a multiple of 32, or the range leaves the weight.
        """
        if start % PANEL_FEATURES or start < 0 or length < 0 or start + length > self.out_features:
            raise ValueError(
                f"output features [{start}, {start + length}) of {self.out_features}: the start must be a multiple of "
                f"{PANEL_FEATURES} and the range must lie inside"
            )
        first, count = start // PANEL_FEATURES, -(-length // PANEL_FEATURES)
        scale = None if self.scale is None else self.scale[:, start : start + length]
        return replace(self, data=self.data[first : first + count], scale=scale, out_features=length)


def pack_linear(weight: Tensor, dtype: str) -> PackedWeight:
    """Pack a linear layer's weight.

    Args:
        weight: [N, K], floating point, finite.
        dtype: "float32" (exact), "bfloat16" (rounded to nearest even) or "int8": rotated (rotation.py), then symmetric per
            output feature: scale = max|row| / 127, value = round(row / scale); at most scale/2 off.

    Raises:
        ValueError: for another dtype or a weight that is not a matrix.
    """
    if dtype not in VALUES_PER_WORD:
        raise ValueError(f"dtype={dtype!r}: packed weights are {', '.join(VALUES_PER_WORD)}")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"weight must be a floating point matrix, got {weight.dtype} of shape {tuple(weight.shape)}"
        )
    weight = weight.detach()
    scale = None
    if dtype == "int8":
        values, scale = _quantize_rotated(weight)
    else:
        values = weight.to(TORCH_DTYPES[dtype])
    out_features, in_features = weight.shape
    return PackedWeight(_to_panels(values, VALUES_PER_WORD[dtype]), scale, in_features, out_features, dtype)


def _quantize_rotated(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_per_feature` of the rotated weight, some features at a time: the rotation makes several float32 copies, and
    packing must not take much more memory than one layer."""
    values, scale = (
        weight.new_empty(weight.shape, dtype=torch.int8),
        weight.new_empty((2, weight.shape[0]), dtype=torch.float32),
    )
    step = max(1, _ROTATED_VALUES // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        values[part], scale[:, part] = quantize_per_feature(rotate_back(weight[part].float()))
    return values, scale


def quantize_per_feature(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per output feature of float32 [N, K]: values int8 [N, K] and float32 [2, N] (scales; sums of the values)."""
    step = weight.abs().amax(dim=1) / 127 if weight.shape[1] else weight.new_zeros(weight.shape[0])
    safe = torch.where(step > 0, step, torch.ones_like(step))
    values = torch.round(weight / safe[:, None]).clamp_(-127, 127).to(torch.int8)
    return values, torch.stack([step, values.sum(dim=1, dtype=torch.float32)])


def unpack_linear(packed: PackedWeight) -> Tensor:
    """The weight [N, K] in float32: bit for bit the original for "float32", dequantised otherwise."""
    values = unpack_values(packed).float()
    return values if packed.scale is None else rotate(values * packed.scale[0, :, None])


def unpack_values(packed: PackedWeight) -> Tensor:
    """The weight [N, K], contiguous, in the dtype that it is packed in: int8 values are neither scaled nor rotated back."""
    panels, words, features, per_word = packed.data.shape
    values = packed.data.permute(0, 2, 1, 3).reshape(panels * features, words * per_word)
    return values[: packed.out_features, : packed.in_features].contiguous()


def concat(weights: Sequence[PackedWeight]) -> PackedWeight:
    """One packed weight with the output features of all of them in a row (q, k and v; gate and up).

    Raises:
        ValueError: if the weights differ in dtype or in_features, or one but the last has out_features not divisible by 32.
    """
    first = weights[0]
    if any(w.dtype != first.dtype or w.in_features != first.in_features for w in weights):
        raise ValueError("weights to concatenate must have the same dtype and in_features")
    if any(w.out_features % PANEL_FEATURES for w in weights[:-1]):
        raise ValueError(f"all weights but the last must have out_features divisible by {PANEL_FEATURES}")
    scales = [w.scale for w in weights if w.scale is not None]
    return replace(
        first,
        data=torch.cat([w.data for w in weights]),
        scale=torch.cat(scales, dim=1) if scales else None,
        out_features=sum(w.out_features for w in weights),
    )


def _to_panels(values: Tensor, per_word: int) -> Tensor:
    out_features, in_features = values.shape
    panels, words = -(-out_features // PANEL_FEATURES), -(-in_features // per_word)
    padded_shape = (panels * PANEL_FEATURES, words * per_word)
    if padded_shape != values.shape:
        padded = values.new_zeros(padded_shape)
        padded[:out_features, :in_features] = values
        values = padded
    return values.view(panels, PANEL_FEATURES, words, per_word).permute(0, 2, 1, 3).contiguous()
