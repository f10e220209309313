"""The format of keys and values in 8 bits, in KV caches and as inputs of `decoder_layers` and `attention`.

Each vector of a head is rounded symmetrically to 127 steps of its largest magnitude, per token and head (as the baseline of
KVQuant, Hooper et al. 2024, arXiv:2401.18079). The step, a float32, is stored in the four bytes after the vector. So one int8
tensor [..., features + 4] holds both, and can be sliced, copied and gathered like a tensor of floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
_STEPS = 127


def stored_width(features: int, dtype: torch.dtype) -> int:
    """Return the size of the last dimension in `dtype` for heads of `features` features."""
    return features + SCALE_BYTES if dtype is torch.int8 else features


def features_of(storage: Tensor) -> int:
    """Return the features of the heads in a storage [..., width]."""
    return storage.shape[-1] - (SCALE_BYTES if storage.dtype is torch.int8 else 0)


def to_storage(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert heads [..., features] to the storage format of `dtype`: a cast, or int8 [..., features + 4]."""
    if dtype is not torch.int8:
        return heads.to(dtype)
    x = heads.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    finite = largest.isfinite()
    inverse = torch.where(finite & (largest > 1e-33), _STEPS / largest, 0.0)
    steps = (x * inverse).nan_to_num(0.0).round().to(torch.int8)
    # Infinity and NaN make the whole vector NaN, so that the error stays visible.
    step = torch.where(finite, largest / _STEPS, torch.nan)
    return torch.cat([steps, _dense(step).view(torch.int8)], dim=-1)


def from_storage(storage: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a storage to heads [..., features] in `dtype`; the storage itself is returned if it has that format."""
    if storage.dtype is not torch.int8:
        return storage.to(dtype)
    steps, step = storage[..., :-SCALE_BYTES], _dense(storage[..., -SCALE_BYTES:]).view(torch.float32)
    return (steps * step).to(dtype)


def _dense(x: Tensor) -> Tensor:
    """Return a copy with dense strides, which can be viewed as any dtype. `contiguous` does not change those of an empty tensor."""
    return x.clone(memory_format=torch.contiguous_format) if x.numel() else x.new_empty(x.shape)
