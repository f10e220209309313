"""The linears of bitsandbytes: 16 levels (NF4, FP4) times the largest magnitude of a block, or integers with a scale per row.

The layouts are those of bitsandbytes.functional: `QuantState`, and `_convert_weight_packed_for_cpu` for weights that have been
multiplied with on a CPU with bfloat16 instructions.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cpu_accel.checkpoints.levels import nearest_grid
from hf_cpu_accel.checkpoints.stored_weight import StoredWeight, holding_group, spread
from hf_cpu_accel.packing.affine import AffineGroups

_CPU_ROWS = 32  # output features of a block in bitsandbytes' own order for the CPU


def read(module: nn.Module) -> StoredWeight | None:
    """Read a `Linear4bit` or `Linear8bitLt` with a quantized weight; None for other modules."""
    host = sys.modules.get("bitsandbytes.nn.modules")
    if host is None:
        return None
    if isinstance(module, host.Linear4bit):
        return _of_levels(module)
    return _of_rows(module) if isinstance(module, host.Linear8bitLt) else None


def _of_levels(module: Any) -> StoredWeight | None:
    weight, state = module.weight, getattr(module.weight, "quant_state", None) or module.quant_state
    if state is None:  # it quantizes when it is moved to its device
        return None
    out_features, in_features = state.shape
    group = holding_group(state.blocksize, in_features)
    levels = state.code.float()
    q, step, start = nearest_grid(levels)

    def magnitudes(first: int, last: int) -> Tensor:
        return spread(_block_magnitudes(state), state.blocksize, first, last, in_features, group or 32)

    def rows(first: int, last: int) -> AffineGroups:
        size = magnitudes(first, last)
        integers = _look_up(q, weight, state, first, last)
        return AffineGroups(integers, step * size, start * size, 8, group or 32)

    def values(first: int, last: int) -> Tensor:
        size = magnitudes(first, last).repeat_interleave(group or 32, dim=1)
        return _look_up(levels, weight, state, first, last) * size[:, :in_features]

    refusal = None
    if group is None:
        refusal = f"blocks of {state.blocksize} cross the rows of {in_features} input features: no group has one scale"
    return StoredWeight(
        f"bitsandbytes {state.quant_type.upper()}",
        out_features,
        in_features,
        8,
        group or 32,
        rows,
        (weight,),
        refusal,
        values=values,
        agreement="int8",
        reference=lambda input: _multiply(module, state, input),
    )


def _multiply(module: Any, state: Any, input: Tensor) -> Tensor:
    """Compute the module's output, without its forward, which reorders the weight and rounds its magnitudes at the first call."""
    if getattr(state, "packing_format_for_cpu", False):
        output: Tensor = module(input)
        return output
    host: Any = sys.modules["bitsandbytes.functional"]
    weight = host.dequantize_4bit(module.weight.data, state).to(input.dtype)
    return F.linear(input, weight, None if module.bias is None else module.bias.to(input.dtype))


def _look_up(table: Tensor, weight: Tensor, state: Any, first: int, last: int) -> Tensor:
    """Return the entries of `table` [16] for the codes of these output features, [last - first, in_features]."""
    columns = state.shape[1]
    packed = weight.detach().as_subclass(Tensor).contiguous().view(torch.uint8)
    if not getattr(state, "packing_format_for_cpu", False):
        pairs = packed.reshape(-1)[first * columns // 2 : last * columns // 2]
        both = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)  # of each byte
        return both.index_select(0, pairs.int()).view(-1, columns)
    pairs = packed.reshape(-1, columns // 2)[first:last].reshape(-1, _CPU_ROWS)
    codes = torch.cat([pairs & 15, pairs >> 4], dim=1).view(-1, columns // 2, _CPU_ROWS, 2)
    return table[codes.transpose(1, 2).reshape(-1, columns).int()]


def _block_magnitudes(state: Any) -> Tensor:
    """Return the largest magnitude of each block, float32, block after block."""
    if getattr(state, "packing_format_for_cpu", False):
        return state.absmax.T.float().reshape(-1)
    if not state.nested:
        return state.absmax.float().reshape(-1)
    inner = state.state2  # these numbers are quantized themselves, in blocks of 256
    sizes = inner.absmax.float().repeat_interleave(inner.blocksize)[: state.absmax.numel()]
    return inner.code.float()[state.absmax.reshape(-1).int()] * sizes + state.offset


def _of_rows(module: Any) -> StoredWeight | None:
    weight, state = module.weight, module.state
    scales, integers = (
        getattr(weight, name) if getattr(weight, name, None) is not None else getattr(state, name)
        for name in ("SCB", "CB")
    )
    if scales is None or weight.dtype is not torch.int8:  # it quantizes when it is moved, or in each call
        return None
    out_features, in_features = weight.shape
    group = holding_group(in_features, in_features) or 64

    def rows(first: int, last: int) -> AffineGroups:
        q = weight.detach().as_subclass(Tensor)[first:last].view(torch.uint8) ^ 128
        scale = scales[first:last, None].float() / 127
        return AffineGroups(q, scale, -128 * scale, 8, group)

    return StoredWeight(
        "bitsandbytes int8",
        out_features,
        in_features,
        8,
        group,
        rows,
        (weight,) if integers is None else (weight, integers),
        agreement="int8",
        # A copy, because its first call moves the scales.
        reference=lambda input: copy.deepcopy(module)(input),
    )
