"""gpt-oss: on CPUs transformers unpacks its experts while it loads them. Loading for us it leaves them as the file has them, so
that they are packed as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.checkpoints.mxfp4 import Mxfp4Stack

# Whether what is being loaded keeps its experts as they are.
_keeps_blocks: ContextVar[bool] = ContextVar("keeps MXFP4 blocks", default=False)


@contextmanager
def experts_in_blocks() -> Iterator[None]:
    """What transformers loads inside from MXFP4 keeps its blocks. One at a time: the function that is exchanged is the host's."""
    try:
        from transformers.integrations import mxfp4
    except ImportError:  # a version without it
        yield
        return
    host: Any = mxfp4
    own = host.dequantize_convertops

    def keep(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> nn.Parameter:
        if not _keeps_blocks.get() or dtype not in (torch.float32, torch.bfloat16):
            return own(blocks, scales, dtype)
        stack = Mxfp4Stack(blocks.contiguous(), scales.contiguous(), dtype)
        return nn.Parameter(stack, requires_grad=False)

    before = _keeps_blocks.set(True)
    host.dequantize_convertops = keep
    try:
        yield
    finally:
        _keeps_blocks.reset(before)
        host.dequantize_convertops = own
