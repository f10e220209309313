"""Encoder layers with disentangled attention (DeBERTa, He et al. 2021, arXiv:2006.03654): one op call.

Their masks are [B, 1, L, L] truth values of any dtype, and hide whole rows: a query that is padding attends to all keys equally.
If padding is computed, a mask of the lowest number does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_cpu_accel.lazy.remember import remember
from hf_cpu_accel.ops.encoder_layer import EncoderInputs
from hf_cpu_accel.rewrite.encoder.layer import FusedEncoderLayer
from hf_cpu_accel.rewrite.encoder.parts import MASK
from hf_cpu_accel.rewrite.encoder.positions import (
    POSITIONS,
    RELATIVE,
    VECTORS,
    DisentangledParts,
    index_of,
    values_of,
)
from hf_cpu_accel.runtime.tracing import is_tracing


class _Tables(NamedTuple):
    vectors: Tensor
    keys: Tensor | None
    queries: Tensor | None


class FusedDisentangledLayer(FusedEncoderLayer):
    """See `FusedEncoderLayer`; for layers with relative positions and their embeddings as arguments.

    Attributes:
        _tables: the latest tables of these embeddings.
    """

    _parts: DisentangledParts
    _tables: _Tables | None = None

    def _inputs(
        self, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[EncoderInputs, None] | None:
        arguments = dict(zip(self._signature.names, args, strict=False)) | kwargs
        mask, relative, vectors = (arguments.pop(name, None) for name in (MASK, RELATIVE, VECTORS))
        # Callers pass None and False for unused options.
        if any(value is not None and value is not False for value in arguments.values()):
            return None
        if hidden_states.dim() != 3 or len(args) > len(self._signature.names):
            return None
        if self.is_watched_within:
            return None
        if is_tracing():  # the values of a mask are unknown yet
            return None
        batch, length = hidden_states.shape[:2]
        if not isinstance(mask, Tensor) or mask.shape != (batch, 1, length, length) or not length:
            return None
        if not isinstance(relative, Tensor) or not self._takes(vectors, hidden_states):
            return None
        index = index_of(relative, length, self._parts.span)
        if index is None:
            return None
        padding, mask = self._padding_and_mask(mask, hidden_states.dtype)
        tables = self._tables_of(vectors)
        inputs = EncoderInputs(
            padding,
            mask,
            position_keys=tables.keys,
            position_queries=tables.queries,
            position_index=index,
        )
        return inputs, None

    def _takes(self, vectors: Any, hidden_states: Tensor) -> bool:
        return (
            isinstance(vectors, Tensor)
            and vectors.dim() == 2
            and vectors.dtype is hidden_states.dtype
            and len(vectors) >= 2 * self._parts.span
            and vectors.shape[1] == hidden_states.shape[2]
        )

    def _padding_and_mask(self, mask: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return the tokens, bool [B, L] or None for all, and the remaining mask for the op."""
        attended, tokens, is_whole = remember(mask, "tokens of pairs", lambda: _tokens(mask))
        if is_whole:
            return None, None
        if tokens is not None and self._skips_padding and self._skips(tokens):
            return tokens, None

        def added() -> Tensor:
            lowest = torch.finfo(dtype).min
            return torch.zeros(attended.shape, dtype=dtype).masked_fill_(~attended, lowest)

        return None, remember(mask, ("pairs", dtype), added)

    def _tables_of(self, vectors: Tensor) -> _Tables:
        values, tables = values_of(vectors), self._tables
        if tables is None or tables.vectors is not values:
            weights = self._parts.weights(bf16_intermediates=self._bf16_intermediates)
            dtype = torch.bfloat16 if weights.bf16_intermediates else torch.float32
            tables = self._tables = _Tables(values, *self._parts.tables(values, dtype))
        return tables

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedDisentangledLayer:
        super()._apply(fn, recurse)
        self._tables = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": None}


def is_disentangled(names: tuple[str, ...]) -> bool:
    """Return whether the arguments are those of a layer with disentangled attention."""
    return POSITIONS | {MASK} <= set(names)


def _tokens(mask: Tensor) -> tuple[Tensor, Tensor | None, bool]:
    """Return bool [B, 1, L, L], the pairs of tokens; bool [B, L], the tokens if all pairs of them are there; and whether all
    are."""
    attended = mask.bool()
    if bool(attended.all()):
        return attended, None, True
    tokens = attended[:, 0].diagonal(dim1=1, dim2=2)
    pairs = tokens[:, :, None] & tokens[:, None]
    return attended, tokens.contiguous() if torch.equal(attended[:, 0], pairs) else None, False
