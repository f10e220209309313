"""The blocks of GGUF files as affine groups, without rounding.

A block has 32 or 256 input features of one output feature: packed integers and, in float16, a scale and sometimes an offset. In
blocks of 256 ("K") these are multiplied by small integers, one per 16 or 32 features. The layouts are those of ggml (ggml-common.h
and ggml-quants.c).
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.packing.affine import AffineGroups

# The levels of IQ4_NL and IQ4_XS.
_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_LAYER = re.compile(r"\.(\d+)\.")

Blocks = Tensor
"""uint8 [blocks, bytes of a block]."""
Parts = tuple[Tensor, Tensor, Tensor]
"""q uint8 [blocks, features], scale and offset float32 [blocks, groups of a block]."""


@dataclass(frozen=True)
class BlockFormat:
    """A format of blocks.

    Attributes:
        features, nbytes: the size of a block.
        bits: 4 or 8, the bits of its integers as affine groups.
        group: the features per scale and offset.
        read: blocks -> their parts.
    """

    name: str
    features: int
    nbytes: int
    bits: int
    group: int
    read: Callable[[Blocks], Parts]


def read_blocks(rows: Tensor, ggml_type: int) -> AffineGroups:
    """Return the weight in a matrix of blocks.

    Args:
        rows: uint8 [out_features, bytes of a row].
        ggml_type: a key of FORMATS.

    Raises:
        ValueError: another type, or rows that are not whole blocks.
    """
    if ggml_type not in FORMATS:
        known = ", ".join(f"{number} ({form.name})" for number, form in FORMATS.items())
        raise ValueError(f"ggml_type={ggml_type}: expected one of {known}")
    form = FORMATS[ggml_type]
    if rows.dim() != 2 or rows.dtype is not torch.uint8 or rows.shape[1] % form.nbytes:
        raise ValueError(
            f"rows: {rows.dtype} of shape {tuple(rows.shape)}; expected uint8 [out_features, a multiple of {form.nbytes}] "
            f"for {form.name}"
        )
    out_features = rows.shape[0]
    q, scale, offset = form.read(rows.reshape(-1, form.nbytes))
    return AffineGroups(
        q.reshape(out_features, -1),
        scale.reshape(out_features, -1),
        offset.reshape(out_features, -1),
        form.bits,
        form.group,
    )


def _half(blocks: Blocks, at: int) -> Tensor:
    """Return float16 numbers as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(data: Tensor, bits: int, width: int) -> Tensor:
    """Unpack bytes [blocks, n * width] into fields of bits: for each `width` bytes, all lowest fields, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    fields = data.reshape(data.shape[0], -1, 1, width) >> shifts
    return (fields & (2**bits - 1)).reshape(data.shape[0], -1)


def _q4_0(blocks: Blocks) -> Parts:
    scale = _half(blocks, 0)
    return _fields(blocks[:, 2:18], 4, 16), scale, -8 * scale


def _q4_1(blocks: Blocks) -> Parts:
    return _fields(blocks[:, 4:20], 4, 16), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Blocks) -> Parts:
    scale = _half(blocks, 0)
    return _five_bits(blocks[:, 6:22], blocks[:, 2:6]), scale, -16 * scale


def _q5_1(blocks: Blocks) -> Parts:
    return _five_bits(blocks[:, 8:24], blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)


def _five_bits(low: Tensor, high: Tensor) -> Tensor:
    """Return 5-bit integers from 4-bit fields and one high bit per feature."""
    return _fields(low, 4, 16) | _fields(high, 1, 1) << 4


def _q8_0(blocks: Blocks) -> Parts:
    return _signed(blocks[:, 2:34]), (scale := _half(blocks, 0)), -128 * scale


def _q2_k(blocks: Blocks) -> Parts:
    scales = blocks[:, :16]
    scale, least = _half(blocks, 80) * (scales & 15), _half(blocks, 82) * (scales >> 4)
    return _fields(blocks[:, 16:80], 2, 32), scale, -least


def _q3_k(blocks: Blocks) -> Parts:
    low, high = _fields(blocks[:, 96:104], 4, 8), _fields(blocks[:, 104:108], 2, 4)
    scale = _half(blocks, 108) * ((low | high << 4).float() - 32)
    q = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    return q, scale, -4 * scale


def _k_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight 6-bit scales and offsets in 12 bytes of Q4_K and Q5_K."""
    scale = torch.cat([scales[:, :4] & 63, scales[:, 8:] & 15 | (scales[:, :4] >> 6) << 4], dim=1)
    least = torch.cat([scales[:, 4:8] & 63, scales[:, 8:] >> 4 | (scales[:, 4:8] >> 6) << 4], dim=1)
    return scale.float(), least.float()


def _q4_k(blocks: Blocks) -> Parts:
    scale, least = _k_scales(blocks[:, 4:16])
    return _fields(blocks[:, 16:144], 4, 32), _half(blocks, 0) * scale, -_half(blocks, 2) * least


def _q5_k(blocks: Blocks) -> Parts:
    scale, least = _k_scales(blocks[:, 4:16])
    q = _fields(blocks[:, 48:176], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return q, _half(blocks, 0) * scale, -_half(blocks, 2) * least


def _q6_k(blocks: Blocks) -> Parts:
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    q = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return q, scale, -32 * scale


def _iq4_nl(blocks: Blocks) -> Parts:
    return _iq4_levels(blocks[:, 2:18]), (scale := _half(blocks, 0)), -128 * scale


def _iq4_xs(blocks: Blocks) -> Parts:
    high = (
        blocks[:, 2:4].contiguous().view(torch.int16).int() >> torch.arange(0, 16, 2, dtype=torch.int32) & 3
    )
    low = _fields(blocks[:, 4:8], 4, 1)
    scale = _half(blocks, 0) * ((low | high << 4).float() - 32)
    return _iq4_levels(blocks[:, 8:136]), scale, -128 * scale


def _iq4_levels(nibbles: Tensor) -> Tensor:
    levels = torch.tensor(_IQ4_LEVELS, dtype=torch.int16).add(128).to(torch.uint8)
    return levels[_fields(nibbles, 4, 16).int()]


def _signed(values: Tensor) -> Tensor:
    """Return signed bytes as unsigned integers counted from -128."""
    return values ^ 128


FORMATS = {
    2: BlockFormat("Q4_0", 32, 18, 4, 32, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, 4, 32, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, 8, 32, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, 8, 32, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, 8, 32, _q8_0),
    10: BlockFormat("Q2_K", 256, 84, 4, 16, _q2_k),
    11: BlockFormat("Q3_K", 256, 110, 4, 16, _q3_k),
    12: BlockFormat("Q4_K", 256, 144, 4, 32, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, 8, 32, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, 8, 16, _q6_k),
    20: BlockFormat("IQ4_NL", 32, 18, 8, 32, _iq4_nl),
    23: BlockFormat("IQ4_XS", 256, 136, 8, 32, _iq4_xs),
}
"""By ggml's numbers. Weights of all other types are unpacked when they are loaded."""


def unpacked_tensors(model: nn.Module) -> tuple[str, ...]:
    """Return a sentence for each tensor of a GGUF file that transformers unpacked while it loaded `model`; layers are joined."""
    host = sys.modules.get("transformers.quantizers.quantizer_gguf")
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if host is None or not isinstance(quantizer, host.GgufHfQuantizer):
        return ()
    if not quantizer.supported:
        return (
            "all weights: dequantized from GGUF at loading, because transformers has no quantized modules for this model",
        )
    from gguf import GGMLQuantizationType

    layers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name, ggml_type in quantizer.quantized.items():
        if name not in quantizer.packed_modules:
            numbers = layers[_LAYER.sub(".*.", name, count=1), GGMLQuantizationType(ggml_type).name]
            numbers.extend(int(number) for number in _LAYER.findall(name)[:1])
    return tuple(
        f"{path.replace('*', _ranges(numbers))}: dequantized from GGUF {kind} at loading"
        for (path, kind), numbers in layers.items()
    )


def _ranges(numbers: list[int]) -> str:
    """Return numbers as "[0-3,7]", a single one as it is."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(numbers) == 1:
        return str(numbers[0])
    return f"[{','.join(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)}]"
