"""Keys and values that a cache holds in another dtype than the one in which its caller computes."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor, settled
from hf_cpu_accel.ops.kv_cache import features_of, from_storage


class StoredHeads(LazyTensor):
    """[batch, kv_heads, kv_len, features]. Our attention reads `stored` itself; for others it is converted, all of it.

    Attributes:
        stored: float32, bfloat16 or int8 as in ops/kv_cache.py.
    """

    stored: Tensor

    @classmethod
    def of(cls, storage: Tensor, dtype: torch.dtype) -> Tensor:
        """The heads of `storage` in `dtype`: a view if it is that already."""
        if storage.dtype is dtype:
            return storage
        heads: StoredHeads = cls.like((*storage.shape[:-1], features_of(storage)), dtype)
        heads.stored = storage
        return heads

    def _make(self) -> Tensor:
        return from_storage(self.stored, self.dtype)


def readable(heads: Tensor) -> Tensor:
    """What the attention op is to read for keys or values that may be `StoredHeads`."""
    heads = settled(heads)
    return heads.stored if isinstance(heads, StoredHeads) else heads
