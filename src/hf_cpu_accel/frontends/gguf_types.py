"""GGUF block types that the reader of transformers lacks; the package gguf, which it requires, dequantizes them.

llama.cpp writes Q5_0 into Q4_K_M files if the rows of a model are not a multiple of 256, as in most small models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.checkpoints.gguf import FORMATS, read_blocks


@contextmanager
def all_block_types() -> Iterator[None]:
    """Make transformers read and dequantize all types of the package gguf inside the context.

    The types of `FORMATS` stay registered afterwards, because linears of loaded models stay in blocks and may run without this
    package.
    """
    from transformers.integrations.gguf import dequant, reader

    host: Any = dequant
    floats: dict[int, torch.dtype] = reader._TORCH_DTYPE
    added = {kind: block for kind, block in _gguf_types().items() if kind not in {*host.GGML_BLOCK, *floats}}
    for kind, (name, *block) in added.items():
        host.GGML_BLOCK[kind] = tuple(block)
        host.GGML_NAME[kind] = name
        host._DEQUANT[kind] = partial(_values, kind)
    try:
        yield
    finally:
        for kind in added.keys() - FORMATS.keys():
            for table in (host.GGML_BLOCK, host.GGML_NAME, host._DEQUANT):
                del table[kind]


@cache
def _gguf_types() -> dict[int, tuple[str, int, int]]:
    """Return {type: (name, features per block, bytes per block)}; empty if the package gguf is not installed."""
    if find_spec("gguf") is None:
        return {}
    import gguf
    import numpy as np

    types = {}
    for kind, (features, nbytes) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, nbytes), dtype=np.uint8), kind)
        except NotImplementedError:  # integers, and blocks of activations
            continue
        types[int(kind)] = (kind.name, features, nbytes)
    return types


def _values(kind: int, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize blocks, uint8 [blocks, bytes per block] -> [blocks, features]."""
    if kind in FORMATS:
        return read_blocks(blocks, kind).dequantize().to(dtype)
    import gguf

    values = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(values).to(dtype)
