"""The keys and values of one attention layer, in storage that grows in buckets and is written in place."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_cpu_accel.generate.beam_rows import BeamRows
from hf_cpu_accel.lazy.stored_heads import StoredHeads
from hf_cpu_accel.ops.kv_cache import features_of, stored_width, to_storage

_BUCKET = 64  # tokens


class CPUCacheLayer(CacheLayerMixin):
    """Keys and values of a layer that attends to all tokens.

    `DynamicLayer` of transformers concatenates: every token copies all earlier ones. Here a token is written after the others,
    and the storage is copied only when it grows, each time by half at least.

    A fused layer writes the storage itself: it calls `reserve(...)`, reads `past = layer.length`, runs its op, which writes the
    positions `past` to `past + q_len`, and calls `advance(q_len)`. Any other layer calls `update`.

    Attributes:
        storage_dtype: float32, bfloat16 or int8, or None for the dtype of the keys.
        key_storage, value_storage: [batch, kv_heads, capacity, features], with four more columns in int8 (ops/kv_cache.py), or
            None before the first token. Values from `length` on are undefined. The tensors stay the same until `reserve` has to
            grow them.
        dtype: of the keys and values that were passed, None before the first token.
        length: tokens in the storage.
        dropped: tokens seen that are no longer in the storage.
        beams: where the keys of each sequence lie, or None while those of sequence b lie in row b.
        repeats: how often a layer passes each head, one after the other (Falcon 40B); one of each is stored.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, storage_dtype: torch.dtype | None = None) -> None:
        # Not the base class's: it sets `keys` and `values`, which are views of the storage here.
        self.storage_dtype = storage_dtype
        self.dtype: torch.dtype | None = None
        self.key_storage: Tensor | None = None
        self.value_storage: Tensor | None = None
        self.length = 0
        self.dropped = 0
        self.beams: BeamRows | None = None
        self.repeats = 1

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.key_storage is not None

    @property
    def capacity(self) -> int:
        """Return the number of tokens that fit in the storage before it grows."""
        return 0 if self.key_storage is None else self.key_storage.shape[2]

    @property
    def rows(self) -> Tensor | None:
        """Return the rows int32 [batch, at least capacity] of the storage with position t of sequence b, or None for row b."""
        return None if self.beams is None else self.beams.covering(self.capacity)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Return the kept keys [batch, kv_heads, tokens, features]: a view unless beams were reordered or the storage has
        another dtype."""
        return self._read(self.key_storage, self._first_needed())

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self._read(self.value_storage, self._first_needed())

    @property
    def device(self) -> torch.device | None:
        return None if self.key_storage is None else self.key_storage.device

    def reserve(
        self, batch: int, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, new_tokens: int
    ) -> None:
        """Make room for `new_tokens` after `length`. This may move the storage, and in sliding layers change `length`.

        Raises:
            ValueError: the cache holds tokens of another batch or of another model.
        """
        self.dtype = dtype
        keys, values = self.key_storage, self.value_storage
        if keys is None or values is None:
            self._allocate(batch, kv_heads, key_dim, value_dim, new_tokens)
            return
        if (batch, kv_heads, key_dim, value_dim) != (*keys.shape[:2], features_of(keys), features_of(values)):
            if self.length:
                raise of_another_model((*keys.shape[:2], features_of(keys)), (batch, kv_heads, key_dim))
            self._allocate(batch, kv_heads, key_dim, value_dim, new_tokens)
        elif self.length + new_tokens > keys.shape[2]:
            self._make_room(new_tokens)

    def advance(self, new_tokens: int) -> None:
        """Count `new_tokens` that were written after `length`."""
        self.length += new_tokens

    def latest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the last `count` tokens, in the form of `update`."""
        keys, values = (
            self._read(storage, self.length - count) for storage in (self.key_storage, self.value_storage)
        )
        assert keys is not None
        assert values is not None
        return keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, kv_heads, new_tokens, key_dim = key_states.shape
        self.reserve(batch, kv_heads, key_dim, value_states.shape[-1], key_states.dtype, new_tokens)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [batch, kv_heads, q_len, features].

        Returns:
            All keys and values to attend to, [batch, kv_heads, kv_len, features], in the dtype of what was passed: views
            of the storage unless beams were reordered or heads are repeated, or `StoredHeads` if it has another dtype.

        Raises:
            ValueError: the cache holds tokens of another batch or of another model.
        """
        key_states, value_states = (states[:, :: self.repeats] for states in (key_states, value_states))
        self.lazy_initialization(key_states, value_states)
        past, new_tokens = self.length, key_states.shape[2]
        assert self.key_storage is not None
        assert self.value_storage is not None
        for storage, states in ((self.key_storage, key_states), (self.value_storage, value_states)):
            storage.narrow(2, past, new_tokens).copy_(to_storage(states, storage.dtype))
        self.advance(new_tokens)
        first = self._first_visible(past)
        keys, values = self._read(self.key_storage, first), self._read(self.value_storage, first)
        assert keys is not None
        assert values is not None
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.dropped + self.length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: a positive number.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove} is not supported: pass the number of tokens as a negative number, or 0"
            )
        self.length = max(0, self.length + tokens_to_remove)
        if self.beams is not None:
            self.beams.crop(self.length)

    def reset(self) -> None:
        """Forget all tokens. The storage stays for the next ones."""
        self.length = self.dropped = 0
        self.beams = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence b continue sequence beam_idx[b]. `CPUCache` does this for all layers without copies."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._replace(lambda states: states[indices])

    def _first_needed(self) -> int:
        """Return the first position in the storage that a later attention can still need."""
        return 0

    def _first_visible(self, past: int) -> int:
        """Return the first position in the storage that a query at `past` attends to."""
        return 0

    def _make_room(self, new_tokens: int) -> None:
        """Grow the storage for `new_tokens` after `length`."""
        self._move(0, bucket(self.length + new_tokens))

    def _allocate(self, batch: int, kv_heads: int, key_dim: int, value_dim: int, new_tokens: int) -> None:
        capacity, dtype = bucket(new_tokens), self.storage_dtype or self.dtype
        assert dtype is not None
        key_width, value_width = stored_width(key_dim, dtype), stored_width(value_dim, dtype)
        self._store((batch, kv_heads, capacity), key_width, value_width, dtype)
        # Fused layers do not write left padding. Others read it with probability 0, and 0 times NaN is NaN.
        for storage in (self.key_storage, self.value_storage):
            storage.zero_()  # type: ignore[union-attr]

    def _store(
        self, sizes: tuple[int, int, int], key_width: int, value_width: int, dtype: torch.dtype
    ) -> None:
        """Create storages of [batch, kv_heads, capacity].

        Storages of one head and of two widths are views of one tensor: for latent attention the two together are a key.
        """
        widths = key_width, value_width
        with outside_inference_mode():
            if sizes[1] == 1 and key_width != value_width:
                both = torch.empty(*sizes, sum(widths), dtype=dtype)
                self.key_storage, self.value_storage = both.split(widths, dim=3)
            else:
                self.key_storage, self.value_storage = (
                    torch.empty(*sizes, width, dtype=dtype) for width in widths
                )

    def _move(self, first: int, capacity: int) -> None:
        """Copy the positions from `first` on to a new storage."""
        assert self.key_storage is not None
        assert self.value_storage is not None
        self._fill(
            self.key_storage[:, :, first : self.length],
            self.value_storage[:, :, first : self.length],
            capacity,
        )
        self.length -= first
        self.dropped += first

    def _replace(self, change: Any) -> None:
        """Apply `change` to the contents of the storage."""
        if not self.length:
            return
        assert self.key_storage is not None
        assert self.value_storage is not None
        keys, values = change(self._stored(self.key_storage, 0)), change(self._stored(self.value_storage, 0))
        self._fill(keys, values, self.capacity)
        self.beams = None

    def _fill(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        """Create a new storage that begins with these keys and values."""
        self._store((*keys.shape[:2], capacity), keys.shape[3], values.shape[3], keys.dtype)
        for storage, states in ((self.key_storage, keys), (self.value_storage, values)):
            storage[:, :, : states.shape[2]] = states  # type: ignore[index]

    def _read(self, storage: Tensor | None, first: int) -> Tensor | None:
        """Return the positions from `first` on, in the dtype that was passed."""
        if storage is None or self.dtype is None:
            return None
        stored = self._stored(storage, first)
        if self.repeats > 1:
            stored = stored.repeat_interleave(self.repeats, dim=1)
        return StoredHeads.of(stored, self.dtype)

    def _stored(self, storage: Tensor, first: int) -> Tensor:
        if self.beams is None:
            return storage.narrow(2, first, self.length - first)
        return self.beams.gather(storage, first, self.length)


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Return a context in which new tensors can be written in any mode. Outputs of compiled graphs always can."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


def of_another_model(held: tuple[int, ...], given: tuple[int, ...]) -> ValueError:
    """Return the error for keys of another shape than the cached ones, as (batch, kv_heads, key_dim) of both."""
    return ValueError(
        f"past_key_values: this cache has batch size {held[0]} and {held[1]} heads of {held[2]} features, but "
        f"keys of batch size {given[0]} and {given[1]} heads of {given[2]} features were passed: pass a cache of the same model "
        "and batch, or None"
    )


def bucket(tokens: int) -> int:
    """Return a capacity for `tokens` and half as many more."""
    wanted = tokens + max(_BUCKET, tokens // 2)
    return -(-wanted // _BUCKET) * _BUCKET
