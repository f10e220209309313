"""The masks that hosts hand to their decoder layers, as what the op takes: causality, a window and padding, or numbers to add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hf_cpu_accel.lazy.causal_mask import CausalMask, read_mask
from hf_cpu_accel.lazy.remember import remember
from hf_cpu_accel.rewrite.decoder.caches import start_of

if TYPE_CHECKING:
    from transformers import Cache

# True or 0 where to attend; True where not to attend (MPT); numbers to add to the scores, for each head (Falcon's ALiBi).
MaskForm = Literal["seen", "hidden", "added"]


def form_of(mask: object, window: int | None) -> MaskForm | None:
    """In which form a host passed `mask` for a prompt whose last sequence has no padding; None for one not known."""
    if mask is None or isinstance(mask, CausalMask):
        return "seen"
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    if mask.dtype is torch.bool and mask[-1, 0, 0, 0]:
        return "seen" if read_mask(mask, window) is not None else None
    if mask.dtype is torch.bool:
        return "hidden" if read_mask(mask, window, hidden=True) is not None else None
    if read_mask(mask, window) is not None:
        return "seen"
    return "added" if window is None and _hides_later_keys(mask) else None


def understood(
    mask: Tensor, form: MaskForm, window: int | None, cache: Cache | None, cache_index: int, batch: int, q_len: int
) -> CausalMask | Tensor | None:  # fmt: skip
    """The mask of a call as what the op takes: a `CausalMask`, or in the form "added" numbers [B, heads, q_len, kv_len].

    None if the op cannot do what it says.
    """
    if mask.dim() != 4 or mask.shape[0] != batch or mask.shape[2] != q_len:
        return None
    if not isinstance(mask, CausalMask):
        past = 0 if cache is None else int(cache.get_seq_length(cache_index))
        mask = _up_to(mask, past + q_len)
        offset = past + q_len - mask.shape[3]
        if offset != _first_key(cache, cache_index, q_len):
            return None
        if form == "added":
            return mask if not offset and mask.is_floating_point() and _hides_later_keys(mask) else None
        read = read_mask(mask, window, tokens_of(cache, offset, batch), hidden=form == "hidden")
        if read is None:
            return None
        mask = read
    return mask if mask.window == window else None


def tokens_of(cache: Cache | None, positions: int, batch: int) -> Tensor | None:
    """bool [batch, positions], True where there is a token, as far as the cache knows; None if there are none."""
    if not positions or cache is None:
        return None
    start = start_of(cache)
    if start is None:
        return torch.ones(batch, positions, dtype=torch.bool)
    return torch.arange(positions) >= start[:, None]


def has_padded_queries(mask: CausalMask | Tensor) -> bool:
    """Whether some queries stand at no token and may be left out."""
    if not isinstance(mask, CausalMask) or mask.padding is None:
        return False
    return not mask.padding[:, -mask.shape[2] :].all()


def attending(mask: CausalMask | Tensor | None, q_len: int) -> Tensor | None:
    """bool [B, q_len], the queries that attend to some key, so that their rows say something; None if all do.

    Args:
        mask: as `understood` gives it.
    """
    if mask is None:
        return None
    if isinstance(mask, CausalMask):
        return None if mask.padding is None else mask.padding[:, -q_len:]
    return (mask > torch.finfo(mask.dtype).min / 2).any(3).any(1)


def mask_like(other: Any, mask: CausalMask, form: MaskForm, dtype: torch.dtype) -> Tensor:
    """`mask` as a host passes it that passed `other` in this form, beside states in `dtype`; what is added may be any numbers."""
    if not isinstance(other, Tensor) or isinstance(other, CausalMask):
        return mask
    if other.dtype is torch.bool:
        return mask.tensor if form == "seen" else ~mask.tensor
    numbers = torch.zeros(mask.shape[0], other.shape[1], *mask.shape[2:])
    if form == "added":
        numbers.normal_(generator=torch.Generator().manual_seed(0))
    return numbers.to(dtype).masked_fill(~mask.tensor, torch.finfo(dtype).min)


def _first_key(cache: Cache | None, cache_index: int, q_len: int) -> int:
    """The position of the first key that a mask is about."""
    if cache is None:
        return 0
    layer: Any = cache.layers[cache_index]
    return int(layer.get_mask_sizes(q_len)[1])


def _up_to(mask: Tensor, kv_len: int) -> Tensor:
    """The first `kv_len` keys of `mask`: a `StaticCache` has masks say of all its positions that there is nothing in them yet."""
    if mask.shape[3] <= kv_len:
        return mask
    return remember(mask, ("first keys", kv_len), lambda: mask[..., :kv_len])


def _hides_later_keys(mask: Tensor) -> bool:
    """Whether no query attends to a key after itself, the last query standing at the last key."""
    q_len, kv_len = mask.shape[2:]
    if q_len == 1:
        return True
    later = torch.ones(q_len, kv_len, dtype=torch.bool).triu(kv_len - q_len + 1)
    return bool((mask[..., later] <= torch.finfo(mask.dtype).min / 2).all())
