"""Decode steps that verify drafts: the loop gets the logits of each token as from plain steps, from fewer calls of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.generate.speculation.calls import TextCalls
from hf_cpu_accel.generate.speculation.draft import Drafter, DraftLength, Speculation, Stopwatch


class SpeculativeSteps:
    """Steps of one text.

    The model is called with the last token and drafts of the next ones, which gives the logits after each of them. While the
    tokens that the loop chooses are those of the draft, these are the logits of its next steps. The loop processes logits, draws,
    and stops as it would without drafts: the tokens are the same, for a seed, too.

    Args:
        calls: of the model.
        drafter: knows the text.
        most: maximum number of tokens to draft.
        length: of the text.
        longest: of the text, at most, or None.
        exact_only: whether to draft only if that is known to change no bit of the logits.
        statistics: counts what is drafted.
    """

    def __init__(
        self,
        calls: TextCalls,
        drafter: Drafter,
        most: int,
        length: int,
        longest: int | None,
        statistics: Speculation,
        *,
        exact_only: bool,
    ) -> None:
        self._calls, self._drafter, self._statistics = calls, drafter, statistics
        self._lengths = DraftLength(most, is_free=drafter.is_free)
        self._length, self._longest = length, longest
        self._may_draft = not exact_only
        self._rows: Tensor | None = None  # of the last call
        self._drafted: list[int] = []  # in it
        self._accepted = 0  # of these
        self._confidence = 0
        self._expected: tuple[int, int] | None = (
            None  # the confidence and first token of a draft that was not made
        )

    def __call__(self, ids: Tensor) -> Tensor:
        """Return logits [1, vocabulary] of the token after `ids`, int64 [1, tokens], which have one more than the last time."""
        token = int(ids[0, -1])
        self._length += 1
        self._drafter.append(token)
        if self._rows is not None and token in self._drafted[self._accepted : self._accepted + 1]:
            self._accepted += 1
            return self._rows[self._accepted : self._accepted + 1]
        self._learn(token)
        drafted = self._draft()
        if drafted:
            ids = torch.cat([ids, torch.tensor([drafted])], dim=1)
        rows = len(drafted) + 1
        was_settled = self._calls.is_settled(rows)
        with Stopwatch() as call:
            self._rows = self._calls.logits(ids, rows)
        if was_settled:
            self._lengths.measured(len(drafted), call.seconds)
        self._drafted, self._accepted = drafted, 0
        return self._rows[:1]

    def close(self) -> None:
        """Leave the cache as after plain steps: with all tokens but the last."""
        self._finish_call()
        self._calls.keep(self._length)

    def _learn(self, token: int) -> None:
        """Learn from the last call, and from a draft that would have begun with the token or with another."""
        self._finish_call()
        if self._drafted:
            self._lengths.observe(self._confidence, len(self._drafted), self._accepted)
            self._calls.keep(self._length - 1)
        elif self._expected is not None:
            confidence, expected = self._expected
            self._lengths.observe(confidence, 1, int(token == expected))
        self._drafted, self._expected = [], None

    def _finish_call(self) -> None:
        if self._drafted:
            self._statistics.add(len(self._drafted), self._accepted)

    def _draft(self) -> list[int]:
        self._confidence = confidence = self._drafter.confidence()
        # The call itself gives a token more than it verifies.
        room = self._lengths.sizes[-1] if self._longest is None else self._longest - self._length - 1
        self._may_draft = self._may_draft or self._calls.is_exact()
        count = self._lengths.choose(confidence, room) if self._may_draft else 0
        if count == 0:
            if confidence and self._drafter.is_free:
                self._expected = confidence, self._drafter.draft(1)[0]
            return []
        with Stopwatch() as drafting:
            drafted = self._drafter.draft(count)
        if not self._drafter.is_free:
            self._lengths.measured_draft(len(drafted), drafting.seconds)
        return drafted
