"""Panels of 32 output features, the order in which kernels read weights, and memory for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.runtime.memory import want_huge_pages

PANEL_FEATURES = 32


def panels_of(values: Tensor, per_word: int, out: Tensor | None = None) -> Tensor:
    """Reorder [N, K] to [panels, words, 32, per_word], padded with zeros.

    Args:
        out: a contiguous tensor of that size for the result, or None for a new one.
    """
    out_features, in_features = values.shape
    if out_features % PANEL_FEATURES or in_features % per_word:
        values = F.pad(values, (0, -in_features % per_word, 0, -out_features % PANEL_FEATURES))
    panels, words = values.shape[0] // PANEL_FEATURES, values.shape[1] // per_word
    result = values.new_empty((panels, words, PANEL_FEATURES, per_word)) if out is None else out
    if values.numel() == 0:
        return result
    # A word is copied as one number. torch transposes one matrix at a time three times as fast as all of them.
    sources = values.contiguous().view(torch.int32).view(panels, PANEL_FEATURES, words)
    targets = result.view(torch.int32).view(panels, words, PANEL_FEATURES)
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source.T)
    return result


def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor for a packed weight, on huge pages if the system has them, since it is read sequentially."""
    data = torch.empty(shape, dtype=dtype)
    want_huge_pages(data.data_ptr(), data.nbytes)
    return data
