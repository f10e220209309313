"""Panels of 32 output features, the order in which kernels read weights, and memory for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.runtime.memory import want_huge_pages

PANEL_FEATURES = 32


def panels_of(values: Tensor, per_word: int, out: Tensor | None = None) -> Tensor:
    """[N, K] in the order [panels, words, 32, per_word], padded with zeros; in `out`, if given, a contiguous tensor of so many
    values."""
    out_features, in_features = values.shape
    if out_features % PANEL_FEATURES or in_features % per_word:
        values = F.pad(values, (0, -in_features % per_word, 0, -out_features % PANEL_FEATURES))
    panels, words = values.shape[0] // PANEL_FEATURES, values.shape[1] // per_word
    made = values.new_empty((panels, words, PANEL_FEATURES, per_word)) if out is None else out
    if values.numel() == 0:
        return made
    # A word is moved as one number. torch turns one matrix at a time three times as fast as all of them.
    whole = values.contiguous().view(torch.int32).view(panels, PANEL_FEATURES, words)
    turned = made.view(torch.int32).view(panels, words, PANEL_FEATURES)
    for source, target in zip(whole, turned, strict=True):
        target.copy_(source.T)
    return made


def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor for a packed weight, on huge pages where the system gives such: it is read front to back."""
    data = torch.empty(shape, dtype=dtype)
    want_huge_pages(data.data_ptr(), data.nbytes)
    return data
