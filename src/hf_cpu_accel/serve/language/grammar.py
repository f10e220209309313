"""Answers that have to be JSON: of each step's logits, only those that a grammar allows are left. llguidance has the grammars."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.serve.limits import BadInput

# Between two marks. Without a limit, a small model that sees no way on writes blanks until its tokens are used up.
_BLANKS = r"\n?[ \t]{0,32}"


class Grammars:
    """Makes masks for one model.

    Args:
        tokenizer: of transformers, a fast one.
        ends: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int]) -> None:
        self._tokenizer, self._ends = tokenizer, sorted(ends)

    def json(self, schema: Mapping[str, Any]) -> GrammarMask:
        """For one answer that is JSON of this schema. The first mask of a model takes up to a second.

        Raises:
            BadInput: llguidance is not installed, can't use this tokenizer, or can't enforce the schema; or nothing ends an answer.
        """
        return self._mask(f"start: {_json(schema)}")

    def call(self, tools: Sequence[Mapping[str, Any]]) -> GrammarMask:
        """For one answer that calls one of these tools, as `CallParser` reads it.

        Raises:
            BadInput: as `json`.
        """
        rules = []
        for number, tool in enumerate(tools):
            name, schema = tool["function"]["name"], tool["function"].get("parameters") or {"type": "object"}
            opening = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
            rules.append(f'call_{number}: {opening} {_json(schema)} "}}"')
        either = " | ".join(f"call_{number}" for number in range(len(rules)))
        return self._mask("\n".join([f"start: {either}", *rules]))

    def _mask(self, grammar: str) -> GrammarMask:
        tokens = self._tokens
        from llguidance import LLMatcher

        matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            raise BadInput(f"the JSON schema can't be enforced: {matcher.get_error()}")
        return GrammarMask(matcher)

    @functools.cached_property
    def _tokens(self) -> Any:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise BadInput(
                'JSON is enforced by llguidance, which the server lacks: pip install "hf_cpu_accel[serve]"'
            ) from error
        if not self._ends:
            raise BadInput("JSON can't be enforced: the model has no token that ends an answer")
        try:
            return from_tokenizer(self._tokenizer, eos_token=self._ends)
        except ValueError as error:
            raise BadInput(f"JSON can't be enforced with this tokenizer: {error}") from error


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _BLANKS}})}"


class GrammarMask:
    """A logits processor of one answer, which follows it token by token."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._seen: int | None = None  # tokens, with those of the prompt

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """
        Args:
            ids: [1, length], the prompt and what was written.
            scores: float32 [1, vocabulary]; what is not allowed becomes minus infinity, in place.

        Raises:
            RuntimeError: the grammar takes too much time or memory to go on with.
        """
        if self._seen is not None:
            self._matcher.consume_tokens(ids[0, self._seen :].tolist())
        self._seen = ids.shape[1]
        # A byte for each token of the tokenizer, 0 where it may not follow.
        forbidden = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) == 0
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar of the answer: {self._matcher.get_error()}")
        known = min(len(forbidden), scores.shape[1])  # models have rows for tokens that no tokenizer knows
        scores[0, :known].masked_fill_(forbidden[:known], -torch.inf)
        scores[0, known:] = -torch.inf
        return scores
