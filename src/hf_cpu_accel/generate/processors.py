"""Logits processors of transformers that forbid a few tokens, without passes over the whole vocabulary.

The originals create masks, copies and sorted sets of the size of the vocabulary in every step, which takes as long as a layer of
a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

Process = Callable[[Tensor, Tensor], Tensor]


def in_place(processors: LogitsProcessorList) -> Process:
    """Return a function of (ids [rows, length], scores [rows, vocabulary]) that does the same as `processors` but may write to
    the scores."""
    steps = [
        _Forbidding(one, _FORBIDDEN[type(one)]) if type(one) in _FORBIDDEN else one for one in processors
    ]
    lean: Any = LogitsProcessorList(steps)
    process: Process = lean
    return process


class _Forbidding:
    """A processor that sets the scores of some tokens to minus infinity."""

    def __init__(self, processor: Any, forbid: Callable[[Any, Tensor, Tensor], None]) -> None:
        self.processor = processor
        self.forbid = forbid

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.forbid(self.processor, input_ids, scores)
        return scores


def _min_length(processor: Any, ids: Tensor, scores: Tensor) -> None:
    if ids.shape[-1] < processor.min_length:
        _forbid(processor.eos_token_id, scores)


def _min_new_tokens(processor: Any, ids: Tensor, scores: Tensor) -> None:
    if ids.shape[-1] - processor.prompt_length_to_skip < processor.min_new_tokens:
        _forbid(processor.eos_token_id, scores)


def _suppressed(processor: Any, ids: Tensor, scores: Tensor) -> None:
    _forbid(processor.suppress_tokens, scores)


def _suppressed_at_begin(processor: Any, ids: Tensor, scores: Tensor) -> None:
    if ids.shape[-1] == processor.begin_index:
        _forbid(processor.begin_suppress_tokens, scores)


def _forbid(tokens: Tensor, scores: Tensor) -> None:
    for token in tokens.tolist():
        if 0 <= token < scores.shape[-1]:  # others are in no vocabulary
            scores[:, token] = -torch.inf


def _no_repeat_ngram(processor: Any, ids: Tensor, scores: Tensor) -> None:
    """Forbid the last token of each n-gram that begins as the sequence ends."""
    size, length = processor.ngram_size, ids.shape[-1]
    if length < size:
        return
    windows = ids.unfold(dimension=1, size=size, step=1)
    repeats = (windows[..., :-1] == ids[:, None, length + 1 - size :]).all(dim=-1)
    rows, places = repeats.nonzero(as_tuple=True)
    tokens = windows[rows, places, -1]
    known = tokens < scores.shape[-1]
    scores[rows[known], tokens[known]] = -torch.inf


_FORBIDDEN: dict[type, Callable[[Any, Tensor, Tensor], None]] = {
    MinLengthLogitsProcessor: _min_length,
    MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    NoRepeatNGramLogitsProcessor: _no_repeat_ngram,
    SuppressTokensLogitsProcessor: _suppressed,
    SuppressTokensAtBeginLogitsProcessor: _suppressed_at_begin,
}
