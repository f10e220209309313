"""MXFP4 experts of gpt-oss: load them in blocks with transformers, so that the blocks are packed directly.

On CPUs, transformers dequantizes them during a load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.checkpoints.mxfp4 import Mxfp4Stack

# Whether the current load keeps experts in blocks.
_keeps_blocks: ContextVar[bool] = ContextVar("keeps MXFP4 blocks", default=False)


@contextmanager
def experts_in_blocks() -> Iterator[None]:
    """Make transformers load MXFP4 experts in blocks inside the context, which replaces a function: use one at a time."""
    try:
        from transformers.integrations import mxfp4
    except ImportError:  # a version without it
        yield
        return
    host: Any = mxfp4
    original = host.dequantize_convertops

    def convert(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> nn.Parameter:
        if not _keeps_blocks.get() or dtype not in (torch.float32, torch.bfloat16):
            return original(blocks, scales, dtype)
        stack = Mxfp4Stack(blocks.contiguous(), scales.contiguous(), dtype)
        return nn.Parameter(stack, requires_grad=False)

    before = _keeps_blocks.set(True)
    host.dequantize_convertops = convert
    try:
        yield
    finally:
        _keeps_blocks.reset(before)
        host.dequantize_convertops = original
