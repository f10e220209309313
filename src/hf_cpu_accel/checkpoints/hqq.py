"""The linears of HQQ: integers of up to 8 bits, (q - zero) * scale over groups of the flattened weight.

The layouts are those of hqq.core: `Quantizer.quantize`, and `BitPack`, which stores the first rows of the integers in the highest
bits.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.checkpoints.stored_weight import StoredWeight, holding_group, spread
from hf_cpu_accel.packing.affine import AffineGroups

_FIELDS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "3bit_32": (3, 10), "2bit_u8": (2, 4), "1bit_u8": (1, 8)}
"""The bits of an integer, and the number of integers per word."""


def read(module: nn.Module) -> StoredWeight | None:
    """Read an `HQQLinear` with a quantized weight; None for other modules."""
    host = sys.modules.get("hqq.core.quantize")
    if host is None or not isinstance(module, host.HQQLinear) or module.W_q is None or module.meta is None:
        return None
    linear: Any = module
    meta, (out_features, in_features) = linear.meta, linear.meta["shape"]
    along_rows = meta["axis"] == 1  # else scales are per input feature
    bits = 4 if meta["nbits"] <= 4 else 8
    # One scale for the whole weight is one for groups of any size.
    width = linear.W_q.shape[1] if meta.get("channel_wise", True) else in_features
    group = holding_group(width, in_features) if along_rows else 32
    holding = group or 32

    def integers(first: int, last: int) -> Tensor:
        return _integers(linear.W_q.detach(), meta, first * in_features, last * in_features).view(
            -1, in_features
        )

    def rows(first: int, last: int) -> AffineGroups:
        zero, scale = (spread(n, width, first, last, in_features, holding) for n in _zero_and_scale(meta))
        return AffineGroups(integers(first, last), scale, -scale * zero, bits, holding)

    def values(first: int, last: int) -> Tensor:
        zero, scale = (n.float().reshape(-1) for n in _zero_and_scale(meta))
        column = torch.arange(first * in_features, last * in_features) % len(scale)
        return (integers(first, last) - zero[column].view(-1, in_features)) * scale[column].view(
            -1, in_features
        )

    refusal = None
    if meta.get("quant_scale") or meta.get("quant_zero"):
        refusal = "HQQ: quantized scales or zeros are not supported"
    elif group is None:
        refusal = (
            f"HQQ: groups of {width} cross the rows of {in_features} input features: no group has one scale"
        )
    dtype = linear.compute_dtype
    return StoredWeight(
        f"HQQ {meta['nbits']} bits" if along_rows else f"HQQ {meta['nbits']} bits, axis 0",
        out_features,
        in_features,
        bits,
        holding,
        rows if along_rows else None,
        (linear.W_q,),
        refusal,
        values=None if along_rows else values,
        agreement="float32" if dtype is torch.float32 else "bfloat16",
        reference=lambda input: linear(input.to(dtype)),
    )


def _zero_and_scale(meta: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if "zero_scale" in meta:
        zero, scale = meta["zero_scale"]
        return zero, scale
    return meta["zero"], meta["scale"]


def _integers(packed: Tensor, meta: dict[str, Any], start: int, stop: int) -> Tensor:
    """Return the elements [start, stop) of the flattened weight, uint8."""
    width = packed.shape[1]
    first, last = start // width, -(-stop // width)
    if meta["packing"] is None:
        integers = packed[first:last].to(torch.uint8)
    else:
        bits, fields = _FIELDS[meta["packing"]]
        words = packed.view(meta["unpack_view_dtype"]) if meta["view_as_float"] else packed
        row = torch.arange(first, last)
        shift = (bits * (fields - 1 - row // len(words)))[:, None].to(words.dtype)
        integers = ((words[row % len(words)] >> shift) & (2**bits - 1)).to(torch.uint8)
    return integers.reshape(-1)[start - first * width : stop - first * width]
