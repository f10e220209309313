"""Keys and values that a layer has put into a cache, as later layers of the same call are handed them (Gemma 3n, Gemma 4)."""

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
    """What one call of a layer puts into its cache.

    Attributes:
        cache: which it is.
        tokens: of the call; past: of the cache before it.
        mask: that the layer got, as it was understood.
        visible, first_key: how many keys a mask of the call is about, and the position of the first.
        store: the storage of the layer, and `stored` how many tokens were in it before the call; from when it is about to run.
        makers: hidden states with whose values these are made, the latest last; one that is held has its own values made, too.
        heads: the keys and values that the mask is about, [B, kv_heads, visible, features]; from when it has run.
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
        """The heads; the layer runs if it has not.

        Raises:
            RuntimeError: all hidden states that it had part in were dropped before they were read.
        """
        states = next(
            (held for reference in reversed(self.makers) if (held := reference()) is not None), None
        )
        if self.heads is None and states is not None:
            states.tensor  # noqa: B018 (has the layer run)
        if self.heads is None:
            raise RuntimeError(
                "the keys and values of a layer were read after its hidden states were dropped; call the model again, or "
                "hf_cpu_accel.restore(model)"
            )
        return self.heads

    def handed(self, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[SharedHeads, SharedHeads]:
        """Keys and values for the layers that share them.

        Args:
            sizes: batch, kv_heads, and features of a key and of a value.
        """
        batch, kv_heads, *features = sizes
        made = []
        for number, width in enumerate(features):
            heads: SharedHeads = SharedHeads.like((batch, kv_heads, self.visible, width), dtype)
            heads.kept, heads._number = self, number
            made.append(heads)
        return made[0], made[1]


class SharedHeads(LazyTensor):
    """[B, kv_heads, visible, features], keys or values. Our layers read the storage of `kept` itself."""

    kept: KeptHeads
    _number: int

    def _make(self) -> Tensor:
        return self.kept.made()[self._number]


def kept_heads(handed: Any, key: Any) -> KeptHeads | None:
    """What a mapping that layers are handed has under `key`, if that is ours."""
    pair = handed.get(key) if isinstance(handed, Mapping) else None
    if (
        not isinstance(pair, tuple)
        or len(pair) != 2
        or not all(isinstance(part, SharedHeads) for part in pair)
    ):
        return None
    kept: KeptHeads = pair[0].kept
    return kept if pair[1].kept is kept else None
