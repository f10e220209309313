"""The beams of a beam search: their tokens, scores, and which of them are finished.

The arithmetic equals that of transformers' `GenerationMixin._beam_search`, step for step and in float32, so that ties and
roundings agree. It runs in NumPy, whose operations on a few dozen numbers take a fraction of torch's time. Only the choice of
the best runs in torch, for the order of equal scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig

_NEVER = -1.0e9  # the score of what must not be chosen
_Array = NDArray[Any]


class Beams:
    """`batch` texts with `beams` running sequences each, and the best finished ones.

    Attributes:
        length: tokens of the running sequences, including the prompt.
        candidates: how many continuations of a text each step considers, so that enough remain if some of them end.
        scores: float32 [batch, beams], of the running sequences.
        finished_scores: float32 [batch, beams], best first, with the length penalty.
        goes_on: whether a result can still improve.
    """

    def __init__(self, input_ids: Tensor, settings: GenerationConfig) -> None:
        beams, maximum = settings.num_beams, settings.max_length
        prompt = input_ids.shape[1]
        batch = len(input_ids) // beams
        ends = settings._eos_token_tensor
        fill = -1 if ends is None else int(settings._pad_token_tensor or ends[0])
        self.settings = settings
        self.prompt = self.length = prompt
        self.candidates = max(2, 1 + (0 if ends is None else len(ends))) * beams
        self.goes_on = True
        self._running = np.full((batch, beams, maximum), fill, dtype=np.int64)
        self._running[:, :, :prompt] = input_ids.view(batch, beams, prompt).numpy()
        self._finished = self._running.copy()
        self.scores = np.full((batch, beams), _NEVER, dtype=np.float32)
        self.scores[:, 0] = 0.0  # all beams are the same prompt: only one of them may go on
        self.finished_scores = np.full((batch, beams), _NEVER, dtype=np.float32)
        self._is_finished = np.zeros((batch, beams), dtype=bool)
        self._improvable = np.ones((batch, 1), dtype=bool)
        self._origins = np.full((batch, beams, maximum - prompt), -1, dtype=np.int32)
        self._finished_origins = self._origins.copy()
        self._texts = np.arange(batch)[:, None]
        self._may_finish = np.arange(self.candidates) < beams

    def extend(self, flat: Tensor, vocabulary: int) -> Tensor:
        """Append continuations int64 [batch, candidates], as beam * vocabulary + token.

        Returns:
            int64 [batch * candidates, length + 1], the extended sequences.
        """
        beam, token = np.divmod(flat.numpy(), vocabulary)
        self._extended = self._running[self._texts, beam]
        self._extended[:, :, self.length] = token
        self._extended_origins = self._origins[self._texts, beam]
        beams = self.settings.num_beams
        self._extended_origins[:, :, self.length - self.prompt] = beam + self._texts * beams
        return torch.from_numpy(self._extended[:, :, : self.length + 1].reshape(-1, self.length + 1))

    def choose(self, scores: Tensor, ends: Tensor) -> Tensor:
        """Continue the best sequences that do not end, and keep the best that do.

        Args:
            scores: float32 [batch, candidates], of the extended sequences.
            ends: bool [batch * candidates], True for those that end here.

        Returns:
            int64 [batch * beams], the sequence that each one continues.
        """
        end, penalized = ends.view(scores.shape).numpy(), scores.numpy()
        self._run_on(penalized + end.astype(np.float32) * np.float32(_NEVER))
        self._finish(penalized, end)
        origins = self._origins[:, :, self.length - self.prompt].reshape(-1)
        self.length += 1
        self._look_ahead(end)
        return torch.from_numpy(origins.astype(np.int64))

    def tokens(self) -> Tensor:
        """Return the sequences int64 [batch * beams, length] so far."""
        return torch.from_numpy(self._running[:, :, : self.length].reshape(-1, self.length))

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best `num_return_sequences` of each text: tokens [n, length], scores [n], and the beams of the tokens [n,
        new]."""
        wanted = self.settings.num_return_sequences
        sequences, scores, origins = (
            torch.from_numpy(part[:, :wanted].reshape(-1, *part.shape[2:]))
            for part in (self._finished, self.finished_scores, self._finished_origins)
        )
        new_tokens = int((origins != -1).sum(dim=1).max())
        return sequences[:, : self.prompt + new_tokens], scores, origins[:, :new_tokens]

    def _run_on(self, scores: _Array) -> None:
        best = _best(scores, self.settings.num_beams)
        self._running = self._extended[self._texts, best]
        self._origins = self._extended_origins[self._texts, best]
        self.scores = scores[self._texts, best]

    def _finish(self, scores: _Array, end: _Array) -> None:
        settings = self.settings
        finishing = end & self._may_finish
        scores = scores / np.float32((self.length + 1 - self.prompt) ** settings.length_penalty)
        full = self._is_finished.all(axis=-1, keepdims=True) & (settings.early_stopping is True)
        for forbidden in (full, ~self._improvable, ~finishing):
            scores = scores + forbidden.astype(np.float32) * np.float32(_NEVER)
        merged = np.concatenate([self.finished_scores, scores], axis=1)
        best = _best(merged, settings.num_beams)
        self.finished_scores = merged[self._texts, best]
        self._is_finished = np.concatenate([self._is_finished, finishing], axis=1)[self._texts, best]
        kept = settings.num_beams
        if (best == np.arange(kept)).all():
            return  # nothing new is among them
        self._finished = np.concatenate([self._finished, self._extended], axis=1)[self._texts, best]
        self._finished_origins = np.concatenate([self._finished_origins, self._extended_origins], axis=1)[
            self._texts, best
        ]

    def _look_ahead(self, end: _Array) -> None:
        """Update whether running sequences can still beat the finished ones; an estimate unless `early_stopping="never"`."""
        settings = self.settings
        longest = settings.early_stopping == "never" and settings.length_penalty > 0.0
        length = (settings.max_length if longest else self.length) - self.prompt
        possible = self.scores[:, :1] / np.float32(length**settings.length_penalty)
        lowest = self.finished_scores.min(axis=1, keepdims=True)
        worst = np.where(self._is_finished, lowest, np.float32(_NEVER))
        self._improvable &= (possible > worst).any(axis=-1, keepdims=True)
        is_open = not (settings.early_stopping is True and self._is_finished.all())
        self.goes_on = bool(self._improvable.any()) and is_open and not end.all()


def _best(scores: _Array, count: int) -> _Array:
    """Return the places of the largest scores, int64 [batch, count], in their order."""
    best: _Array = torch.topk(torch.from_numpy(scores), k=count)[1].numpy()
    return best
