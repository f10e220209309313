"""Linears with a weight in a tensor class of torchao, in plain integers or in the layout of torch's CPU kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.checkpoints import tinygemm
from hf_cpu_accel.checkpoints.stored_weight import StoredWeight, holding_group, integers_of, is_stand_in
from hf_cpu_accel.packing.affine import AffineGroups

Rows = Callable[[int, int], AffineGroups]


def read(module: nn.Module) -> StoredWeight | None:
    """Read a linear with a quantized weight of torchao; None for other modules."""
    if type(module) is not nn.Linear or not is_stand_in(module.weight):
        return None
    weight: Any = module.weight
    supported = next((entry for entry in _CLASSES if type(weight) is _class(*entry[:2])), None)
    if supported is None:
        return None
    bits = _bits(weight)
    form = f"torchao {type(weight).__name__.removesuffix('Tensor')}, {bits} bits"
    stored_group, in_features = weight.block_size[1], weight.shape[1]
    group = holding_group(stored_group, in_features)
    refusal = None
    if getattr(weight, "act_pre_scale", None) is not None:
        refusal = f"{form}: a scaled input is not supported"
    elif getattr(weight, "act_mapping_type", None) is not None:
        refusal = f"{form}: the layout of a kernel for quantized inputs is not supported"
    elif group is None:
        refusal = f"{form}: groups of {stored_group} input features are not supported"
    packed_bits = 4 if bits <= 4 else 8
    return StoredWeight(
        form,
        weight.shape[0],
        in_features,
        packed_bits,
        group or 32,
        supported[2](weight, packed_bits, group or 32),
        integers_of(weight),
        refusal,
        agreement=_agreement(weight),
        reference=lambda input: module(input.to(weight.dtype)),
    )


def _class(host: str, name: str) -> type | None:
    return getattr(sys.modules.get(host), name, None)


def _bits(weight: Any) -> int:
    if hasattr(weight, "target_dtype"):  # torch.int1 to torch.int8
        return int(str(weight.target_dtype).removeprefix("torch.int"))
    return 8 if weight.qdata.shape == weight.shape and weight.qdata.dtype is torch.int8 else 4


def _agreement(weight: Any) -> str:
    rounds = ("act_quant_kwargs", "activation_quantization")
    if any(getattr(weight, name, None) is not None for name in rounds):
        return "int8"
    return "float32" if weight.dtype is torch.float32 else "bfloat16"


def _integers(weight: Any, bits: int, group: int) -> Rows:
    """Read signed integers, with a scale and optionally a zero per block of rows and columns."""
    block_rows, given = weight.block_size
    middle = 2 ** (bits - 1)

    def rows(first: int, last: int) -> AffineGroups:
        blocks = torch.arange(first, last) // block_rows
        scale = _repeated(weight.scale.detach()[blocks].float(), given, group)
        offset = -middle * scale
        if weight.zero_point is not None:
            offset -= scale * _repeated(weight.zero_point.detach()[blocks].float(), given, group)
        q = (
            (weight.qdata.detach()[first:last] + middle)
            if bits == 4
            else weight.qdata.detach()[first:last] ^ -128
        )
        return AffineGroups(q.view(torch.uint8), scale, offset, bits, group)

    return rows


def _pairs(weight: Any, bits: int, group: int) -> Rows:
    """Read two signed integers per byte, the first in the low half; scales and offsets are [groups, out_features]."""
    given = weight.block_size[1]

    def rows(first: int, last: int) -> AffineGroups:
        pairs = weight.qdata.detach()[first:last].view(torch.uint8)
        q = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1) ^ 8
        scale, zero = (part.detach()[:, first:last].T.float() for part in (weight.scale, weight.zero_point))
        scale, zero = (_repeated(part, given, group) for part in (scale, zero))
        return AffineGroups(q, scale, zero - 8 * scale, bits, group)

    return rows


def _of_kernel(weight: Any, bits: int, group: int) -> Rows:
    integers = cache(lambda: tinygemm.integers(weight.qdata.detach(), weight.shape[1]))
    return lambda first, last: tinygemm.affine_rows(
        integers(), weight.scale_and_zero.detach(), group, first, last
    )


def _repeated(values: Tensor, given: int, group: int) -> Tensor:
    return values.repeat_interleave(max(1, given // group), dim=1)


_CLASSES: tuple[tuple[str, str, Callable[[Any, int, int], Rows]], ...] = (
    ("torchao.quantization", "Int8Tensor", _integers),
    ("torchao.quantization", "IntxUnpackedToInt8Tensor", _integers),
    ("torchao.quantization", "Int4Tensor", _pairs),
    ("torchao.prototype.quantization.int4.int4_opaque_tensor", "Int4OpaqueTensor", _of_kernel),
)
"""Module and name of a class, and what reads its rows, given the bits and the group to be written."""
