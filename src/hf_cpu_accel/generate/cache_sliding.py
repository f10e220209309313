"""The keys and values of a layer with a sliding window, in storage of about two windows and 256 tokens."""

from __future__ import annotations

import torch

from hf_cpu_accel.generate.cache_layer import CPUCacheLayer, bucket

_PART = 256  # tokens; `part_keys` of csrc/attention/attention.h: a text is cut in the same places, however much of it was dropped


class CPUSlidingCacheLayer(CPUCacheLayer):
    """Keys and values of a layer that attends to the last `sliding_window` tokens, including the current one.

    The storage holds about two windows and 256 tokens, as only multiples of 256 are dropped. When it is full, what is still needed
    moves to its front: one copy of a window per window of tokens instead of one per token.
    """

    is_sliding = True

    def __init__(self, sliding_window: int, storage_dtype: torch.dtype | None = None) -> None:
        super().__init__(storage_dtype)
        self.sliding_window = sliding_window
        self.record_past = False
        self._settled = 0  # tokens that no crop removes, while the past is recorded

    def activate_past_recording(self) -> None:
        """Keep tokens that leave the window until `crop` is called, which may remove newer ones."""
        if not self.record_past:
            self._settled = self.length
        self.record_past = True

    def reserve(
        self, batch: int, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, new_tokens: int
    ) -> None:
        super().reserve(batch, kv_heads, key_dim, value_dim, dtype, new_tokens)
        if self.capacity > self._enough(new_tokens) and self._droppable() > 0:
            self._make_room(new_tokens)  # after a long prompt most of its storage is not needed any more

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        past = min(self.get_seq_length(), self.sliding_window - 1)
        return past + query_length, self.get_seq_length() - past

    def get_max_length(self) -> int:
        return self.sliding_window

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: a positive number.
            RuntimeError: earlier tokens of the window were dropped; `activate_past_recording` keeps them.
        """
        if self.dropped and self.length + tokens_to_remove < self.sliding_window - 1:
            raise RuntimeError(
                f"cannot remove {-tokens_to_remove} tokens: earlier tokens of the window were dropped. Call "
                "`activate_past_recording` before adding tokens"
            )
        super().crop(tokens_to_remove)
        self._settled = self.length

    def reset(self) -> None:
        super().reset()
        self._settled = 0

    def _first_needed(self) -> int:
        return self._first_visible(self._settled if self.record_past else self.length)

    def _first_visible(self, past: int) -> int:
        return max(0, past - self.sliding_window + 1)

    def _enough(self, new_tokens: int) -> int:
        return bucket(2 * self.sliding_window + _PART + new_tokens)

    def _droppable(self) -> int:
        """Return how many tokens at the front of the storage are not needed any more. With beams all stay, since they share
        positions."""
        return 0 if self.beams is not None else self._first_needed() // _PART * _PART

    def _make_room(self, new_tokens: int) -> None:
        droppable, enough = self._droppable(), self._enough(new_tokens)
        left = self.length - droppable
        overlap = droppable < left
        if overlap or self.capacity > enough or left + new_tokens > self.capacity:
            wanted = bucket(left + new_tokens)
            self._move(droppable, min(wanted, enough) if left <= 2 * self.sliding_window + _PART else wanted)
        else:
            for storage in (self.key_storage, self.value_storage):
                assert storage is not None
                storage[:, :, :left] = storage[:, :, droppable : self.length]
            self.length = left
            self.dropped += droppable
        self._settled -= droppable
