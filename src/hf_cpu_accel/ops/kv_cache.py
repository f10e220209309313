"""Keys and values in 8 bits: the format in which caches hold them, and `decoder_layers` and `attention` read them.

Each vector of a head is rounded to 127 steps of its largest magnitude, symmetrically (per token and head, as in KVQuant's
baseline, Hooper et al. 2024, arXiv:2401.18079), and the length of the step, a float32, lies in the four bytes behind it. So one
tensor holds it all: [..., features + 4] int8, which can be cut, copied and gathered as one of floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
_STEPS = 127


def stored_width(features: int, dtype: torch.dtype) -> int:
    """The last dimension of a storage of this dtype for heads of so many features."""
    return features + SCALE_BYTES if dtype is torch.int8 else features


def features_of(storage: Tensor) -> int:
    """The features of the heads in a storage [..., width]."""
    return storage.shape[-1] - (SCALE_BYTES if storage.dtype is torch.int8 else 0)


def to_storage(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """heads [..., features] as a storage of `dtype` holds them: cast, or int8 [..., features + 4]."""
    if dtype is not torch.int8:
        return heads.to(dtype)
    x = heads.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    finite = largest.isfinite()
    inverse = torch.where(finite & (largest > 1e-33), _STEPS / largest, 0.0)
    steps = (x * inverse).nan_to_num(0.0).round().to(torch.int8)
    # Infinity and NaN make the whole vector NaN: what is broken stays visible.
    step = torch.where(finite, largest / _STEPS, torch.nan)
    return torch.cat([steps, _dense(step).view(torch.int8)], dim=-1)


def from_storage(storage: Tensor, dtype: torch.dtype) -> Tensor:
    """The heads [..., features] of a storage, in `dtype`; the storage itself where nothing is to be changed."""
    if storage.dtype is not torch.int8:
        return storage.to(dtype)
    steps, step = storage[..., :-SCALE_BYTES], _dense(storage[..., -SCALE_BYTES:]).view(torch.float32)
    return (steps * step).to(dtype)


def _dense(x: Tensor) -> Tensor:
    """With strides and an offset that any dtype can be seen through: `contiguous` leaves those of an empty tensor as they are."""
    return x.clone(memory_format=torch.contiguous_format) if x.numel() else x.new_empty(x.shape)
