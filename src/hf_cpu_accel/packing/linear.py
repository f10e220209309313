"""Packing of weights of linear layers: strided tensors in the order in which the kernels read them, and a small header.

A weight [N, K] becomes panels of 32 output features. Inside a panel, the weights of one "word" of input features (4 bytes: one
float32, two bfloat16 or four int8 values) are adjacent for the 32 features, so that the kernel reads it sequentially:

    data[panel, k_word, feature in panel, value in word]        shape [ceil(N/32), ceil(K/per_word), 32, per_word]

Smaller forms have one dimension less, by which the kernels distinguish them:

    int8-weight  data[panel, k_word, 4 * feature in panel + value in word]: int8 weights for activations in 16 bits
    int4         data[panel, group, byte]: see packing/int4.py; activations in 8 bits

- A float32 weight that other code uses too may stay [N, K], and is packed panel by panel in each product.
- Weights in affine groups have one dimension more (packing/affine.py), for activations in 16 bits.
- Weights of convolutions may have more dimensions (packing/convolution.py).

The layout is the same for every instruction-set tier and thread count: a packed weight can be saved on one machine and used on
another. Padding is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_cpu_accel.packing import affine, int4
from hf_cpu_accel.packing.affine import BITS, AffineGroups
from hf_cpu_accel.packing.panels import PANEL_FEATURES, allocate, panels_of
from hf_cpu_accel.packing.rotated import shape_of
from hf_cpu_accel.packing.rotation import rotate

DTYPES = ("float32", "bfloat16", "int8", "int8-weight", "int4")  # for `pack_linear` and the config
FORMS = (*DTYPES, "affine8", "affine4")  # of packed weights
QUANTIZED = ("int8", "int8-weight", "int4")  # values of the rotated weight, with a scale per output feature


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight of a linear layer.

    Attributes:
        data: float32, bfloat16 or int8 [ceil(out_features/32), ceil(in_features/per_word), 32, per_word]; "int8-weight": int8
            [ceil(out_features/32), ceil(in_features/4), 128]; "int4": uint8 [ceil(out_features/32), ceil(in_features/group),
            32 + 16 group]; "affine4" and "affine8": uint8, see affine.py. Weights of convolutions: also as in convolution.py. A
            float32 weight that is not packed: [out_features, in_features].
        scale: QUANTIZED only, float32 [2, out_features]: row 0 the scale of each output feature, row 1 the sum of its integer
            weights (to subtract the input's zero point); None otherwise. The integers are those of the rotated weight, except
            where images are quantized as a whole.
        in_features, out_features: K and N of the original weight.
        dtype: one of FORMS.
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
        """Return the output features [start, start + length), with the data as a view.

        Raises:
            ValueError: start is not a multiple of 32, or the range is not inside the weight.
        """
        if start % PANEL_FEATURES or start < 0 or length < 0 or start + length > self.out_features:
            raise ValueError(
                f"output features [{start}, {start + length}) of {self.out_features}: the start must be a multiple of "
                f"{PANEL_FEATURES} and the range must lie inside"
            )
        if self.data.dim() == 2:
            return replace(self, data=self.data[start : start + length], out_features=length)
        first, count = start // PANEL_FEATURES, -(-length // PANEL_FEATURES)
        scale = None if self.scale is None else self.scale[..., start : start + length]
        if scale is not None and scale.dim() > 2:
            scale = scale.contiguous()  # of a weight for tiles, which the kernel indexes by position
        return replace(self, data=self.data[first : first + count], scale=scale, out_features=length)


def pack_linear(weight: Tensor, dtype: str, *, int4_group: int = 32) -> PackedWeight:
    """Pack a linear layer's weight.

    Args:
        weight: [N, K], floating point, finite.
        dtype: "float32" (exact), "bfloat16" (rounded to nearest even), or one of these on the rotated weight (rotation.py):
            "int8" and "int8-weight": symmetric per output feature: scale = max|row| / 127, value = round(row / scale), with an
            error of at most scale / 2. "int4": packing/int4.py. "affine4", "affine8": not rotated, by `affine.quantize`.
        int4_group: the number of input features per multiplier of int4 (32, 64 or 128), or per scale and offset of affine groups.

    Raises:
        ValueError: another dtype or group, or a weight that is not a matrix.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"weight must be a floating point matrix, got dtype {weight.dtype} and shape {tuple(weight.shape)}"
        )
    weight = weight.detach()
    if dtype in BITS:
        return pack_affine(affine.quantize(weight, BITS[dtype], int4_group))
    out_features, in_features = weight.shape
    (shape, kind), *_ = shapes_of(out_features, in_features, dtype, int4_group=int4_group)
    if dtype in QUANTIZED:
        data, scale = _pack_rotated(weight, dtype, int4_group)
    else:
        data = allocate(shape, kind)
        panels_of(weight.to(kind), shape[-1], data)
        scale = None
    return PackedWeight(data, scale, in_features, out_features, dtype)


def pack_affine(weight: AffineGroups, *, half: bool | None = None) -> PackedWeight:
    """Pack a weight in affine groups without rounding; `half` as in `affine.pack`."""
    packed = affine.pack(weight, half=half)
    data = allocate(packed.shape, packed.dtype).copy_(packed)
    return PackedWeight(data, None, weight.q.shape[1], weight.q.shape[0], weight.dtype)


def shapes_of(
    out_features: int, in_features: int, dtype: str, *, int4_group: int = 32
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of the `data` of a packed weight N x K, and of its `scale` if it has one.

    Raises:
        ValueError: the dtype is not in FORMS.
    """
    if dtype not in FORMS:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(FORMS)}")
    if dtype in BITS:  # `affine.quantize` returns scales in float16
        return [(affine.shape_of(out_features, in_features, BITS[dtype], int4_group, half=True), torch.uint8)]
    panels = -(-out_features // PANEL_FEATURES)
    data: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "float32": ((panels, in_features, PANEL_FEATURES, 1), torch.float32),
        "bfloat16": ((panels, -(-in_features // 2), PANEL_FEATURES, 2), torch.bfloat16),
        "int8": (shape_of(out_features, in_features, 0), torch.int8),
        "int8-weight": ((panels, -(-in_features // 4), PANEL_FEATURES * 4), torch.int8),
        "int4": (shape_of(out_features, in_features, int4_group), torch.uint8),
    }
    return [data[dtype], ((2, out_features), torch.float32)] if dtype in QUANTIZED else [data[dtype]]


def pack_stack(weights: Iterable[Tensor], count: int, dtype: str, *, int4_group: int = 32) -> PackedWeight:
    """Pack the weights of several linear layers as one, with concatenated output features.

    They are packed one by one, so that only one of them is in memory besides the result.

    Args:
        weights: `count` weights, at least one, all [N, K] with N a multiple of 32.
        count: the number of weights.
        dtype, int4_group: as in `pack_linear`.

    Raises:
        ValueError: as in `pack_linear`, or N is not a multiple of 32.
    """
    return _stack((pack_linear(weight, dtype, int4_group=int4_group) for weight in weights), count)


def pack_affine_stack(weight: Callable[[int], AffineGroups], count: int) -> PackedWeight:
    """Pack weights in affine groups as one, without rounding.

    Args:
        weight: a function from the index to the weight; called again for all if a scale is not representable in float16.
        count: the number of weights.

    Raises:
        ValueError: N is not a multiple of 32.
    """
    try:
        return _stack((pack_affine(weight(number), half=True) for number in range(count)), count)
    except affine.NotHalfError:
        return _stack((pack_affine(weight(number), half=False) for number in range(count)), count)


def _stack(weights: Iterable[PackedWeight], count: int) -> PackedWeight:
    stack: PackedWeight | None = None
    for number, packed in enumerate(weights):
        rows, panels = packed.out_features, len(packed.data)
        if rows % PANEL_FEATURES or not rows:
            raise ValueError(
                f"weights of {rows} output features: must be a multiple of {PANEL_FEATURES} to be stacked"
            )
        if stack is None:
            data = allocate((count * panels, *packed.data.shape[1:]), packed.data.dtype)
            scale = None if packed.scale is None else torch.empty(2, count * rows, dtype=torch.float32)
            stack = replace(packed, data=data, scale=scale, out_features=count * rows)
        stack.data[number * panels : (number + 1) * panels] = packed.data
        if stack.scale is not None and packed.scale is not None:
            stack.scale[:, number * rows : (number + 1) * rows] = packed.scale
    if stack is None:
        raise ValueError("weights is empty: at least one is required")
    return stack


def dtype_of(data: Tensor) -> str:
    """Return the packed dtype of `PackedWeight.data`.

    Raises:
        ValueError: the tensor is not the data of a packed weight.
    """
    forms = {
        (torch.float32, 2): "float32",  # not packed
        (torch.float32, 4): "float32",
        (torch.bfloat16, 4): "bfloat16",
        (torch.int8, 4): "int8",
        (torch.int8, 5): "int8",
        (torch.float32, 6): "float32",
        (torch.bfloat16, 6): "bfloat16",
        (torch.int8, 6): "int8",
        (torch.int8, 3): "int8-weight",
        (torch.uint8, 3): "int4",
    }
    if data.dtype is torch.uint8 and data.dim() == 5:
        return f"affine{data.shape[2]}"
    dtype = forms.get((data.dtype, data.dim()))
    if dtype is None:
        raise ValueError(f"data of dtype {data.dtype} and shape {tuple(data.shape)} is not a packed weight")
    return dtype


def _pack_rotated(weight: Tensor, dtype: str, group: int) -> tuple[Tensor, Tensor]:
    """Return the data and scale of integer weights."""
    if dtype == "int4":
        int4.check_group(group)
    (shape, kind), (scale_shape, scale_kind) = shapes_of(
        weight.shape[0], weight.shape[1], dtype, int4_group=group
    )
    data, scale = allocate(shape, kind), torch.empty(scale_shape, dtype=scale_kind)
    values = weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()
    torch.ops.hf_cpu_accel.pack_rotated(values.contiguous(), group if dtype == "int4" else 0, data, scale)
    return data, scale


def unpack_linear(packed: PackedWeight) -> Tensor:
    """Return the weight [N, K] in float32: bit-identical for "float32", dequantized otherwise."""
    if packed.dtype in BITS:
        return affine.unpack(packed.data, packed.out_features, packed.in_features).dequantize()
    values = unpack_values(packed).float()
    if packed.scale is None:
        return values
    return rotate(values * packed.scale[0, :, None])


def unpack_values(packed: PackedWeight) -> Tensor:
    """Return the stored values [N, K], contiguous: float32, bfloat16, or the integers of QUANTIZED in int8, not scaled or rotated
    back.

    Not for affine groups, which no other provider multiplies.
    """
    if packed.data.dim() == 2:
        return packed.data
    if packed.dtype == "int4":
        values = int4.unpack(packed.data)
    else:
        data = packed.data.unflatten(2, (PANEL_FEATURES, 4)) if packed.dtype == "int8-weight" else packed.data
        panels, words, features, per_word = data.shape
        values = data.permute(0, 2, 1, 3).reshape(panels * features, words * per_word)
    return values[: packed.out_features, : packed.in_features].contiguous()


def concat(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Concatenate the output features of packed weights (q, k and v; gate and up).

    Raises:
        ValueError: the weights differ in dtype, int4 group or in_features, or out_features of one but the last is not divisible by
            32.
    """
    first = weights[0]
    alike = (first.dtype, first.in_features, first.data.shape[1:])
    if any((w.dtype, w.in_features, w.data.shape[1:]) != alike for w in weights):
        raise ValueError("weights to concatenate must have the same dtype, group and in_features")
    if any(w.out_features % PANEL_FEATURES for w in weights[:-1]):
        raise ValueError(f"all weights but the last must have out_features divisible by {PANEL_FEATURES}")
    scales = [w.scale for w in weights if w.scale is not None]
    return replace(
        first,
        data=torch.cat([w.data for w in weights]),
        scale=torch.cat(scales, dim=-1) if scales else None,
        out_features=sum(w.out_features for w in weights),
    )
