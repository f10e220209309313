"""Convert the masks that hosts pass to their decoder layers for the op: causality, a window and padding, or numbers to add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hf_cpu_accel.lazy.causal_mask import CausalMask, read_mask
from hf_cpu_accel.lazy.remember import remember
from hf_cpu_accel.lazy.shared_heads import KeptHeads
from hf_cpu_accel.rewrite.decoder.caches import remember_start, start_of

if TYPE_CHECKING:
    from transformers import Cache

# True or 0 where to attend; True where not to attend (MPT); numbers to add to the scores, for each head (Falcon's ALiBi).
MaskForm = Literal["seen", "hidden", "added"]


def form_of(mask: object, window: int | None) -> MaskForm | None:
    """Return the form of the host's `mask` for a prompt whose last sequence has no padding, or None for an unknown one."""
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


def convert_mask(
    mask: Tensor, form: MaskForm, window: int | None, cache: Cache | None, cache_index: int, batch: int, q_len: int,
    kept: KeptHeads | None = None,
) -> CausalMask | Tensor | None:  # fmt: skip
    """Return the mask of a call for the op: a `CausalMask`, or in the form "added" numbers [B, heads, q_len, kv_len].

    None if the op does not support it.

    Args:
        kept: the keys that the layer attends to, if another layer stored them; the mask may be of its last queries.
    """
    if mask.dim() != 4 or mask.shape[0] != batch or mask.shape[2] != q_len:
        return None
    if not isinstance(mask, CausalMask):
        if kept is None:
            past = 0 if cache is None else int(cache.get_seq_length(cache_index))
            first_key = _first_key(cache, cache_index, q_len)
        else:
            past, first_key = kept.past + kept.tokens - q_len, kept.first_key
        mask = _up_to(mask, past + q_len)
        offset = past + q_len - mask.shape[3]
        if offset != first_key:
            return None
        if form == "added":
            return mask if not offset and mask.is_floating_point() and _hides_later_keys(mask) else None
        before, start = tokens_of(cache, offset, batch), start_of(cache)
        read = read_mask(mask, window, before, start=start, hidden=form == "hidden")
        if read is None:
            return None
        if kept is not None and q_len != kept.tokens:
            read = _of_last(read, kept)
        return read if read is not None and read.window == window else None
    return mask if mask.window == window else None


def _of_last(mask: CausalMask, kept: KeptHeads) -> CausalMask | None:
    """Return `mask`, which is of the last queries of a call, with the padding of the mask of all queries, whose first keys these
    do not see; None if the two contradict."""
    padding = kept.mask.padding if isinstance(kept.mask, CausalMask) else None
    if padding is not None and padding.shape[1] != mask.kv_offset + mask.shape[3]:
        return None
    batch, _, q_len, kv_len = mask.shape
    made = CausalMask.of(batch, q_len, kv_len, mask.kv_offset, mask.window, padding)
    return made if torch.equal(made.tensor, mask.tensor) else None


def start_and_mask(
    masks: Sequence[CausalMask | Tensor | None], cache: Cache | None, dropped: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the op's `start` and `mask`, from the masks of the calls, or from the cache for steps without a mask.

    `dropped` positions are no longer in the storage. Without masks only recurrent layers run, which read no earlier tokens.
    """
    if not masks:
        return None, None
    if isinstance(masks[0], Tensor) and not isinstance(masks[0], CausalMask):
        return None, masks[0]
    causal = [mask for mask in masks if isinstance(mask, CausalMask)]
    padded = next((mask for mask in causal if mask.padding is not None), None)
    start = padded.start if padded is not None else start_of(cache)
    if padded is not None:
        remember_start(cache, start)
    if start is not None:
        return start if not dropped else (start - dropped).clamp_min(0), None
    if padded is None or padded.padding is None:
        return None, None
    return None, padded.padding[:, None, None, dropped:]  # padding on the right, or in between


def same_mask(one: CausalMask | Tensor | None, other: CausalMask | Tensor | None) -> bool:
    """Return whether the masks hide the same, apart from windows."""
    if any(isinstance(mask, Tensor) and not isinstance(mask, CausalMask) for mask in (one, other)):
        return one is other
    first, second = (mask.padding if isinstance(mask, CausalMask) else None for mask in (one, other))
    if first is None or second is None or first is second:
        return first is second
    return torch.equal(first, second)


def tokens_of(cache: Cache | None, positions: int, batch: int) -> Tensor | None:
    """Return bool [batch, positions], True where there is a token, from the cache, or None without positions."""
    if not positions or cache is None:
        return None
    start = start_of(cache)
    if start is None:
        return torch.ones(batch, positions, dtype=torch.bool)
    return torch.arange(positions) >= start[:, None]


def has_padded_queries(mask: CausalMask | Tensor) -> bool:
    """Return whether some queries are padding and may be skipped."""
    if not isinstance(mask, CausalMask) or mask.padding is None:
        return False
    return not mask.padding[:, -mask.shape[2] :].all()


def attending(mask: CausalMask | Tensor | None, q_len: int) -> Tensor | None:
    """Return bool [B, q_len], the queries that attend to some key, so that their rows are defined; None if all do.

    Args:
        mask: as returned by `convert_mask`.
    """
    if mask is None:
        return None
    if isinstance(mask, CausalMask):
        return None if mask.padding is None else mask.padding[:, -q_len:]
    return (mask > torch.finfo(mask.dtype).min / 2).any(3).any(1)


def mask_like(other: Any, mask: CausalMask, form: MaskForm, dtype: torch.dtype) -> Tensor:
    """Return `mask` in the form of a host that passed `other`, next to states in `dtype`; added numbers may differ."""
    if not isinstance(other, Tensor) or isinstance(other, CausalMask):
        return mask
    if other.dtype is torch.bool:
        return mask.tensor if form == "seen" else ~mask.tensor
    numbers = torch.zeros(mask.shape[0], other.shape[1], *mask.shape[2:])
    if form == "added":
        numbers.normal_(generator=torch.Generator().manual_seed(0))
    return numbers.to(dtype).masked_fill(~mask.tensor, torch.finfo(dtype).min)


def _first_key(cache: Cache | None, cache_index: int, q_len: int) -> int:
    """Return the position of the first key of a mask."""
    if cache is None:
        return 0
    layer: Any = cache.layers[cache_index]
    return int(layer.get_mask_sizes(q_len)[1])


def _up_to(mask: Tensor, kv_len: int) -> Tensor:
    """Return the first `kv_len` keys of `mask`: masks for a `StaticCache` also cover its empty positions."""
    if mask.shape[3] <= kv_len:
        return mask
    return remember(mask, ("first keys", kv_len), lambda: mask[..., :kv_len])


def _hides_later_keys(mask: Tensor) -> bool:
    """Return whether no query attends to a later key, the last query being at the last key."""
    q_len, kv_len = mask.shape[2:]
    if q_len == 1:
        return True
    later = torch.ones(q_len, kv_len, dtype=torch.bool).triu(kv_len - q_len + 1)
    return bool((mask[..., later] <= torch.finfo(mask.dtype).min / 2).all())
