"""The mask of a decoder as causality, a window and padding, instead of one boolean per query and key."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import CellType
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.lazy.remember import remember


class CausalMask(LazyTensor):
    """bool [batch, 1, q_len, kv_len], True where to attend; computed only if it is read.

    The last query is at the last key. Key k of the mask is at position `kv_offset` + k of the sequence.

    Attributes:
        kv_offset: the position of the first key.
        window: the number of keys that a query sees, including its own; None for all.
        padding: bool [batch, kv_offset + kv_len], True at tokens, or None without padding.
    """

    kv_offset: int
    window: int | None
    padding: Tensor | None
    _start: Tensor | bool | None

    @classmethod
    def of(
        cls, batch: int, q_len: int, kv_len: int, kv_offset: int, window: int | None, padding: Tensor | None
    ) -> CausalMask:
        mask: CausalMask = cls.like((batch, 1, q_len, kv_len), torch.bool)
        # A copy, because the caller may write to it before this mask is read.
        mask.padding = None if padding is None else padding.clone()
        mask.kv_offset, mask.window = kv_offset, window
        mask._start = False
        return mask

    @property
    def start(self) -> Tensor | None:
        """The position of the first token of each sequence, int32 [batch]; None if there is padding after it."""
        if self._start is False:
            self._start = None if self.padding is None else _first_tokens(self.padding)
        assert not isinstance(self._start, bool)
        return self._start

    @property
    def hides_by_window(self) -> bool:
        """Return whether the mask has keys outside of the window of a query."""
        return self.window is not None and self.shape[-1] > self.window

    def key_padding(self) -> Tensor | None:
        """Return the padding of the keys, bool [batch, kv_len], True at tokens; None without padding."""
        return None if self.padding is None else self.padding[:, self.kv_offset :]

    def _make(self) -> Tensor:
        batch, _, q_len, kv_len = self.shape
        query = torch.arange(kv_len - q_len, kv_len)[:, None]
        key = torch.arange(kv_len)
        seen = key <= query
        if self.window is not None:
            seen &= key > query - self.window
        seen = seen.expand(batch, 1, q_len, kv_len)
        padding = self.key_padding()
        return seen if padding is None else seen & padding[:, None, None]


def causal_mask(
    batch: int,
    q_len: int,
    kv_len: int,
    q_offset: int,
    kv_offset: int,
    window: int | None,
    padding: Tensor | None,
) -> CausalMask | None:
    """Return the mask, or None if `is_causal` alone describes it.

    Args:
        q_offset, kv_offset: the positions of the first query and the first key; the last query must be at the last key.
        window: the number of keys that a query sees, including its own; None for all.
        padding: bool [batch, kv_offset + kv_len], True at tokens, or None.

    Raises:
        ValueError: the last query is not at the last key, or `padding` has another shape.
    """
    if q_offset + q_len != kv_offset + kv_len:
        raise ValueError(
            f"q_offset={q_offset}: the last of {q_len} queries must be at the last key, position {kv_offset + kv_len - 1}"
        )
    if padding is not None:
        if padding.shape != (batch, kv_offset + kv_len):
            raise ValueError(
                f"padding of shape {tuple(padding.shape)}: must be {(batch, kv_offset + kv_len)}, all positions up to the last key"
            )
        if padding.all():
            padding = None
    mask = CausalMask.of(batch, q_len, kv_len, kv_offset, window, padding)
    aligned = (
        q_len == 1 or q_len == kv_len
    )  # `is_causal` then means the same aligned to the first and to the last key
    return None if padding is None and aligned and not mask.hides_by_window else mask


def read_mask(
    mask: Tensor,
    window: int | None,
    before: Tensor | None = None,
    *,
    start: Tensor | None = None,
    hidden: bool = False,
) -> CausalMask | None:
    """Read a mask, bool or added to the scores, as causality, the window and padding; None if it is anything else.

    The result is cached for layers with the same mask.

    Args:
        before: bool [batch, positions], True at tokens, for the positions before the first key; None if there are none.
        start: int32 [batch], the positions of the first tokens, if `before` was computed from them; else all in `before` are
            tokens.
        hidden: whether a boolean mask is True where *not* to attend.
    """
    key = "causal mask", window, None if before is None else before.shape, hidden
    return remember(mask, key, lambda: _read(mask, window, before, hidden), also=(start,), by_value=True)


def _read(mask: Tensor, window: int | None, before: Tensor | None, hidden: bool) -> CausalMask | None:
    if mask.dim() != 4 or mask.shape[1] != 1:
        return None
    batch, _, q_len, kv_len = mask.shape
    seen = ~mask if hidden and mask.dtype is torch.bool else mask
    if mask.dtype is not torch.bool:
        seen = mask == 0
        if not (seen | (mask <= torch.finfo(mask.dtype).min / 2)).all():
            return None
    padding = seen.any(dim=2)[:, 0]  # each token sees at least itself
    unseen = 0 if window is None else kv_len - q_len - window + 1
    if unseen > 0:  # keys outside of all windows are treated like the first key in a window
        padding[:, :unseen] = padding[:, unseen : unseen + 1]
    queries = padding[:, None, kv_len - q_len :, None]
    if before is not None:
        padding = torch.cat([before, padding], dim=1)
    kv_offset = padding.shape[1] - kv_len
    causal = CausalMask.of(batch, q_len, kv_len, kv_offset, window, None if padding.all() else padding)
    return causal if ((seen == causal.tensor) | ~queries).all() else None


def is_sliding_causal(function: Callable[..., Any], window: int) -> bool:
    """Return whether `function` is transformers' mask function of a causal sliding window of that size."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    return same_function(function, sliding_window_causal_mask_function(window))


def same_function(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Return whether two functions have the same code and close over the same values."""
    return _content(one) == _content(other)


@cache
def plain_causal() -> Callable[..., Any]:
    """Return transformers' mask function of causality alone."""
    from transformers.masking_utils import causal_mask_function

    return causal_mask_function


def _content(value: Any) -> Any:
    """Return a function as its code and the values of its closure: functions with equal content compute the same."""
    if isinstance(value, tuple):
        return tuple(_content(part) for part in value)
    if isinstance(value, CellType):
        return _content(value.cell_contents)
    if callable(value) and hasattr(value, "__code__"):
        return value.__code__, _content(value.__closure__ or ())
    return value if isinstance(value, int | float | str | type(None)) else id(value)


def _first_tokens(padding: Tensor) -> Tensor | None:
    tokens = padding.sum(dim=1)
    start = padding.shape[1] - tokens
    # The first True is at `start` if all following ones are True; a row without True has no start.
    if not torch.equal(padding.int().argmax(dim=1), start):
        return None
    return start.int()
