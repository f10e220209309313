"""Linears as GPTQ, AWQ and fp8 checkpoints store them, written as their tools do it: one output feature and field after another.

After `pack_original` of gptqmodel 7.7 (gptqmodel/nn_modules/qlinear/__init__.py), `from_linear` of autoawq 0.2.9 (gemm.py and
gemv.py in awq/modules/linear) and the blocks of DeepSeek-V3. These packages want compilers or GPUs: tests do not install them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_cpu_accel.checkpoints.formats import checkpoint_of
from hf_cpu_accel.checkpoints.stored_linear import StoredLinear

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Written:
    """The tensors of one linear, and the weight [N, K] in float32 that they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor


def pack_fields(fields: np.ndarray, bits: int) -> np.ndarray:
    """int32 [words, columns] of fields [rows, columns]: each row's bits behind those of the one before."""
    words = np.zeros((-(-fields.shape[0] * bits // 32), fields.shape[1]), dtype=np.uint64)
    for row, values in enumerate(fields.astype(np.uint64)):
        word, shift = divmod(row * bits, 32)
        words[word] |= values << np.uint64(shift)
        if shift + bits > 32:
            words[word + 1] |= values >> np.uint64(32 - shift)
    return (words & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)


def gptq(
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group: int = 32,
    version: int = 1,
    symmetric: bool = False,
    index: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Written:
    """A random weight; `index` gives each input feature its group (act order)."""
    generator = torch.Generator().manual_seed(seed)
    size = columns if group == -1 else group
    groups = -(-columns // size)
    if index is None:
        index = torch.arange(columns) // size
    q = torch.randint(0, 2**bits, (columns, rows), generator=generator)
    zero = torch.randint(1, 2**bits, (groups, rows), generator=generator)
    if symmetric:
        zero = torch.full_like(zero, 2 ** (bits - 1))
    scale = (torch.rand(groups, rows, generator=generator) * 0.02 / 2**bits + 1e-4).to(dtype)
    stored = (zero - 1 if version == 1 else zero).numpy()
    tensors = {
        "qweight": torch.from_numpy(pack_fields(q.numpy(), bits)),
        "qzeros": torch.from_numpy(pack_fields(stored.T, bits).T.copy()),
        "scales": scale,
        "g_idx": index.int(),
    }
    return Written(tensors, ((q - zero[index]) * scale.float()[index]).T.contiguous())


def awq(rows: int, columns: int, *, group: int = 32, gemv: bool = False, seed: int = 0) -> Written:
    """A random weight in one of AutoAWQ's two orders."""
    generator = torch.Generator().manual_seed(seed)
    size = columns if group == -1 else group
    groups = columns // size
    q = torch.randint(0, 16, (rows, columns), generator=generator)
    zero = torch.randint(0, 16, (rows, groups), generator=generator)
    scale = (torch.rand(rows, groups, generator=generator) * 0.002 + 1e-4).half()
    weight = ((q - zero.repeat_interleave(size, 1)) * scale.float().repeat_interleave(size, 1)).contiguous()
    if not gemv:
        order = np.arange(rows).reshape(-1, 8)[:, list(AWQ_ORDER)].reshape(-1)
        packed, zeros = (pack_fields(values.numpy()[order], 4).T.copy() for values in (q, zero))
        tensors = {
            "qweight": torch.from_numpy(packed),
            "qzeros": torch.from_numpy(zeros),
            "scales": scale.T.contiguous(),
        }
        return Written(tensors, weight)
    width = _zeros_width(columns, size)
    wide = torch.zeros(rows, width * 8, dtype=torch.float16)
    wide[:, :groups] = scale
    zeros = torch.zeros(rows, width, dtype=torch.int32)
    stored = torch.from_numpy(pack_fields(zero.numpy().T, 4).T.copy())
    zeros[:, : stored.shape[1]] = stored
    packed = torch.from_numpy(pack_fields(q.numpy().T, 4).T.copy())
    return Written({"qweight": packed, "qzeros": zeros, "scales": wide}, weight)


def _zeros_width(columns: int, group: int) -> int:
    """`calculate_zeros_width` of awq/modules/linear/gemv.py."""
    multiplier = {64: 2, 32: 4}.get(group, 1) if group < 128 else 1
    width = (columns // group + 7) // 8
    return (width + multiplier - 1) // multiplier * multiplier


def fp8(rows: int, columns: int, *, block: tuple[int, int] | None = (128, 128), seed: int = 0) -> Written:
    """A random weight in 8 bits of floating point, with a scale for each block, or one."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) * 60).to(torch.float8_e4m3fn)
    high, wide = block or (rows, columns)
    blocks = (-(-rows // high), -(-columns // wide))
    scale = torch.rand(blocks, generator=generator) * 0.002 + 1e-4
    each = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    stored = scale if block else scale.reshape(())
    return Written({"weight": weight, "weight_scale_inv": stored}, weight.float() * each)


def stored_linear(config: dict[str, Any], written: Written, *, bias: bool = False) -> StoredLinear:
    """A linear over what was written."""
    rows, columns = written.weight.shape
    layout = checkpoint_of(config).layout("layer", rows, columns, written.tensors)
    assert layout is not None
    module = StoredLinear(layout, torch.nn.Parameter(torch.randn(rows)) if bias else None)
    for name, tensor in written.tensors.items():
        setattr(module, name, torch.nn.Parameter(tensor, requires_grad=False))
    layout.check(module.tensors)
    return module
