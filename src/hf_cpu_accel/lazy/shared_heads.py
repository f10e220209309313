"""Keys and values of a layer in the KV cache that later layers of the same call share (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor


@dataclass(eq=False)
class KeptHeads:
    """The keys and values that one call of a layer writes to its cache.

    Attributes:
        cache: the KV cache.
        tokens, past: the number of tokens of the call, and of the cache before it.
        mask: the mask of the layer.
        visible, first_key: the number of keys of a mask of the call, and the position of the first.
        store, stored: the storage of the layer, and the number of its tokens before the call; set when the layer is about to run.
        makers: references to hidden states whose computation computes these, the latest last.
        heads: the keys and values of the mask, [B, kv_heads, visible, features]; set when the layer has run.
    """

    cache: Any
    tokens: int
    past: int
    mask: Tensor | None
    visible: int
    first_key: int
    store: Any = None
    stored: int = 0
    makers: list[ReferenceType[Any]] = field(default_factory=list)
    heads: tuple[Tensor, Tensor] | None = None

    def begin(self, store: Any) -> None:
        self.store, self.stored = store, store.length

    def end(self) -> None:
        self.heads = self.store.latest(self.visible)

    def made(self) -> tuple[Tensor, Tensor]:
        """Return the heads, after running the layer if needed.

        Raises:
            RuntimeError: all hidden states that compute them were dropped before they were read.
        """
        states = next(
            (state for reference in reversed(self.makers) if (state := reference()) is not None), None
        )
        if self.heads is None and states is not None:
            states.tensor  # noqa: B018 (runs the layer)
        if self.heads is None:
            raise RuntimeError(
                "the keys and values of a layer were read after its hidden states were dropped; call the model again, or "
                "hf_cpu_accel.restore(model)"
            )
        return self.heads

    def handed(self, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[SharedHeads, SharedHeads]:
        """Return keys and values for the layers that share them.

        Args:
            sizes: batch, kv_heads, and features of a key and of a value.
            dtype: of the keys and values.
        """
        batch, kv_heads, *features = sizes
        pair = []
        for number, width in enumerate(features):
            heads: SharedHeads = SharedHeads.like((batch, kv_heads, self.visible, width), dtype)
            heads.kept, heads._number = self, number
            pair.append(heads)
        return pair[0], pair[1]


class SharedHeads(LazyTensor):
    """Keys or values [B, kv_heads, visible, features]. Replaced layers read the storage of `kept` directly."""

    kept: KeptHeads
    _number: int

    def _make(self) -> Tensor:
        return self.kept.made()[self._number]


def kept_heads(handed: Any, key: Any) -> KeptHeads | None:
    """Return the `KeptHeads` under `key` of a mapping that is passed to layers, or None."""
    pair = handed.get(key) if isinstance(handed, Mapping) else None
    if (
        not isinstance(pair, tuple)
        or len(pair) != 2
        or not all(isinstance(part, SharedHeads) for part in pair)
    ):
        return None
    kept: KeptHeads = pair[0].kept
    return kept if pair[1].kept is kept else None
