"""Keys and values in another dtype in the KV cache than in the model."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor, settled
from hf_cpu_accel.ops.kv_cache import features_of, from_storage


class StoredHeads(LazyTensor):
    """Keys or values [batch, kv_heads, kv_len, features]. `attention` reads `stored` directly; other code gets a converted copy.

    Attributes:
        stored: float32, bfloat16, or int8 as in ops/kv_cache.py.
    """

    stored: Tensor

    @classmethod
    def of(cls, storage: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the heads of `storage` in `dtype`; `storage` itself if it has that dtype."""
        if storage.dtype is dtype:
            return storage
        heads: StoredHeads = cls.like((*storage.shape[:-1], features_of(storage)), dtype)
        heads.stored = storage
        return heads

    def _make(self) -> Tensor:
        return from_storage(self.stored, self.dtype)


def readable(heads: Tensor) -> Tensor:
    """Return the argument of the attention op for keys or values that may be `StoredHeads`."""
    heads = settled(heads)
    return heads.stored if isinstance(heads, StoredHeads) else heads
