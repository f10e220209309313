"""Attention in float32 over long sequences: ours or torch's, whose blocks go through BLAS. Which is faster depends on the BLAS."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.providers.autotune import NATIVE, autotune

# From so many keys on the two are alike for all lengths; below ours is ahead.
LONG = 512
_LENGTH, _HEADS = 1024, 2


def torch_is_faster(head_dim: int) -> bool:
    """With heads of that size on the threads that are in use now. Measured once in a process, in about 50 ms."""
    return _measured(head_dim, torch.get_num_threads())


@cache
def _measured(head_dim: int, threads: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    shape = (1, _LENGTH, _HEADS, head_dim)
    query, key, value = (torch.randn(shape, generator=generator).transpose(1, 2) for _ in range(3))
    with torch.no_grad():
        candidates = {
            NATIVE: lambda: attention(query, key, value),
            "torch": lambda: functional.scaled_dot_product_attention(query, key, value),
        }
        return autotune(candidates).winner != NATIVE
