"""Structured output: grammars of llguidance mask the logits of each step, so that answers are valid JSON or tool calls."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.serve.limits import BadInput

# Whitespace between two JSON tokens. Without a limit, small models may write whitespace until max_tokens.
_BLANKS = r"\n?[ \t]{0,32}"


class Grammars:
    """Create masks for one model.

    Args:
        tokenizer: a fast tokenizer of transformers.
        ends: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int]) -> None:
        self._tokenizer, self._ends = tokenizer, sorted(ends)

    def json(self, schema: Mapping[str, Any]) -> GrammarMask:
        """Return the mask for one answer in JSON with this schema. The first mask of a model takes up to a second.

        Raises:
            BadInput: llguidance is not installed or does not support the tokenizer or the schema, or the model has no end token.
        """
        return self._mask(f"start: {_json(schema)}")

    def call(self, tools: Sequence[Mapping[str, Any]]) -> GrammarMask:
        """Return the mask for one answer that calls one of these tools, in the format of `CallParser`.

        Raises:
            BadInput: see `json`.
        """
        rules = []
        for number, tool in enumerate(tools):
            name, schema = tool["function"]["name"], tool["function"].get("parameters") or {"type": "object"}
            opening = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
            rules.append(f'call_{number}: {opening} {_json(schema)} "}}"')
        calls = " | ".join(f"call_{number}" for number in range(len(rules)))
        return self._mask("\n".join([f"start: {calls}", *rules]))

    def _mask(self, grammar: str) -> GrammarMask:
        tokens = self._tokens
        from llguidance import LLMatcher

        matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            raise BadInput(f"the JSON schema is not supported: {matcher.get_error()}; simplify it")
        return GrammarMask(matcher)

    @functools.cached_property
    def _tokens(self) -> Any:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise BadInput(
                "JSON output needs llguidance, which is not installed on the server: "
                'run pip install "hf_cpu_accel[serve]"'
            ) from error
        if not self._ends:
            raise BadInput(
                "JSON output is not supported by this model, which has no end token; set eos_token_id in its generation config"
            )
        try:
            return from_tokenizer(self._tokenizer, eos_token=self._ends)
        except ValueError as error:
            raise BadInput(
                f"JSON output is not supported with the tokenizer of this model: {error}"
            ) from error


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _BLANKS}})}"


class GrammarMask:
    """A logits processor for one answer, which masks the tokens that the grammar forbids."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._seen: int | None = None  # number of tokens so far, including the prompt

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Set the scores of forbidden tokens to minus infinity, in place.

        Args:
            ids: the prompt and the new tokens so far, int64 [1, length].
            scores: logits of the next token, float32 [1, vocabulary].

        Raises:
            RuntimeError: the grammar exceeds its limits of time or memory.
        """
        if self._seen is not None:
            self._matcher.consume_tokens(ids[0, self._seen :].tolist())
        self._seen = ids.shape[1]
        # One byte per token of the tokenizer, 0 for a forbidden token.
        forbidden = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) == 0
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar of the answer failed: {self._matcher.get_error()}")
        size = min(len(forbidden), scores.shape[1])  # models may have more rows than the tokenizer has tokens
        scores[0, :size].masked_fill_(forbidden[:size], -torch.inf)
        scores[0, size:] = -torch.inf
        return scores
