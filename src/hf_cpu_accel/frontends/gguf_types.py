"""Types of GGUF blocks that transformers' reader lacks: the package gguf, which it needs for any such file, unpacks them.

llama.cpp writes Q5_0 into the Q4_K_M files of models whose rows are no multiple of 256, which most small models are.
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
    """Inside, transformers reads and unpacks every type that the package gguf unpacks.

    Afterwards it has those of `FORMATS` still: linears of loaded models stay in their blocks, and may compute without us.
    """
    from transformers.integrations.gguf import dequant, reader

    host: Any = dequant
    floats: dict[int, torch.dtype] = reader._TORCH_DTYPE
    added = {
        kind: block for kind, block in _unpacked_by_gguf().items() if kind not in {*host.GGML_BLOCK, *floats}
    }
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
def _unpacked_by_gguf() -> dict[int, tuple[str, int, int]]:
    """Return {type: (its name, features of a block, bytes of a block)}; none where the package is not installed."""
    if find_spec("gguf") is None:
        return {}
    import gguf
    import numpy as np

    found = {}
    for kind, (features, nbytes) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, nbytes), dtype=np.uint8), kind)
        except NotImplementedError:  # integers, and blocks of activations
            continue
        found[int(kind)] = (kind.name, features, nbytes)
    return found


def _values(kind: int, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack blocks, uint8 [blocks, bytes of a block] -> [blocks, features]."""
    if kind in FORMATS:
        return read_blocks(blocks, kind).dequantize().to(dtype)
    import gguf

    values = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(values).to(dtype)
