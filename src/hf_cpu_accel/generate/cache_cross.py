"""Keys and values of cross-attention: written once, and shared by all beams of a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.generate.cache_layer import CPUCacheLayer, outside_inference_mode
from hf_cpu_accel.ops.kv_cache import to_storage


class CPUCrossCacheLayer(CPUCacheLayer):
    """Keys and values of a cross-attention layer, one set per text.

    Reordering beams, repeating or dropping sequences changes `encoder_sequences` only: no key is copied.

    Attributes:
        key_storage, value_storage: [encoder_sequences, kv_heads, length, features].
        encoder_sequences: int32 [batch], the row of the storage that each sequence reads, or None if sequence b reads row b.
            Layers with equal rows share one tensor.
    """

    encoder_sequences: Tensor | None = None

    def store(self, keys: Tensor, values: Tensor, encoder_sequences: Tensor | None) -> tuple[Tensor, Tensor]:
        """Replace the contents by these keys and values [encoder_sequences, kv_heads, length, features], and return them as
        stored."""
        with outside_inference_mode():
            self.key_storage, self.value_storage = (
                to_storage(states, self.storage_dtype or states.dtype).contiguous()
                for states in (keys, values)
            )
        self.dtype, self.encoder_sequences, self.length = keys.dtype, encoder_sequences, keys.shape[2]
        return self.key_storage, self.value_storage

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [batch, kv_heads, length, features]; see `CPUCacheLayer.update`."""
        keys, values = self.keys, self.values
        if self.length and keys is not None and values is not None:
            key_states = torch.cat([keys, key_states], dim=2)
            value_states = torch.cat([values, value_states], dim=2)
        self.store(key_states, value_states, None)
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def reset(self) -> None:
        super().reset()
        self.encoder_sequences = None

    def select(self, change: Callable[[Tensor], Tensor], known: dict[int, Tensor]) -> None:
        """Apply `change` to the batch. `known` maps `encoder_sequences` of earlier layers to their changed ones."""
        if not self.length:
            return
        assert self.key_storage is not None
        key = id(self.encoder_sequences)
        if key not in known:
            encoder_sequences = self.encoder_sequences
            if encoder_sequences is None:
                encoder_sequences = torch.arange(self.key_storage.shape[0], dtype=torch.int32)
            known[key] = change(encoder_sequences)
        self.encoder_sequences = known[key]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select(lambda encoder_sequences: encoder_sequences.repeat_interleave(repeats), {})

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(lambda encoder_sequences: encoder_sequences[indices], {})

    def _stored(self, storage: Tensor, first: int) -> Tensor:
        states = storage[:, :, first : self.length]
        return states if self.encoder_sequences is None else states[self.encoder_sequences.long()]
