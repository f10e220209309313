"""The choice between `attention` and torch's attention for long float32 sequences. The result depends on torch's BLAS."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.providers.autotune import NATIVE, autotune

# From this many keys on, the ratio is the same for all lengths; below, `attention` is faster.
LONG = 512
_LENGTH, _HEADS = 1024, 2


def torch_is_faster(head_dim: int) -> bool:
    """Return whether torch's attention is faster for this head size and the present threads. Measured once, in about 50 ms."""
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
