"""A language model of the server: its engine, its tokenizer and its chat template."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal

from hf_cpu_accel.serve.engine import Engine, Generation
from hf_cpu_accel.serve.language.grammar import GrammarMask, Grammars
from hf_cpu_accel.serve.language.parser import CallParser, Parser, Piece, parser
from hf_cpu_accel.serve.language.sampling import Sampling, processors
from hf_cpu_accel.serve.language.stream import Streams
from hf_cpu_accel.serve.language.text import Prompt, TextStream
from hf_cpu_accel.serve.limits import BadInput, TooLong

Form = Literal["anything", "JSON", "call"]
_NEW_TOKENS = 1024  # default maximum for chats


class LanguageModel:
    """Serve a causal language model.

    Args:
        name: the name for clients.
        model: an accelerated causal language model of transformers.
        tokenizer: its tokenizer.
        rows: see `Engine`.
        waiting: see `Engine`.
        on_first: called with the seconds to the first token of each answer.
        engine: further options of `Engine`.
    """

    capabilities = ("generate",)

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        *,
        rows: int = 8,
        waiting: int = 64,
        on_first: Callable[[float], object] | None = None,
        **engine: Any,
    ) -> None:
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.engine = Engine(model, rows=rows, waiting=waiting, **engine)
        self._streams = Streams(rows + waiting, on_first)
        self.ends = frozenset(_ids(model.generation_config.eos_token_id) + _ids(tokenizer.eos_token_id))
        self.grammars = Grammars(tokenizer, self.ends)

    @property
    def waiting(self) -> int:
        return self.engine.metrics.waiting

    def prompt(self, text: str | list[int]) -> Prompt:
        """Return the prompt of `/v1/completions` from a text, with the special tokens of the tokenizer, or from token ids.

        Raises:
            BadInput: no tokens, or a token id that is not in the vocabulary.
        """
        ids = text if isinstance(text, list) else self.tokenizer(text)["input_ids"]
        vocabulary = self.model.config.get_text_config().vocab_size
        if not ids:
            raise BadInput("the prompt is empty; pass at least one token")
        if (wrong := next((token for token in ids if not 0 <= token < vocabulary), None)) is not None:
            raise BadInput(f"the prompt contains the token id {wrong}; accepted are 0 to {vocabulary - 1}")
        return Prompt(list(ids))

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        hints: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Return the prompt of a chat, rendered by the chat template.

        Args:
            messages: messages for `apply_chat_template` of transformers.
            tools: tools for the template.
            variables: further variables that the template must use.
            hints: further variables that the template may use.

        Raises:
            BadInput: the model has no chat template, the template does not use tools or a variable, or it rejects the messages.
        """
        from jinja2 import TemplateError

        if tools:
            self._check_template("tools", "tools")
        for name in variables or ():
            self._check_template(name, name)
        self._check_template("messages", "chats")
        try:
            ids = self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=True,
                return_dict=False,
                **{**(hints or {}), **(variables or {})},
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise BadInput(f"the chat template of {self.name!r} rejects these messages: {error}") from error
        return Prompt(list(ids), tools, is_chat=True)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None,
        sampling: Sampling,
        mask: GrammarMask | None = None,
    ) -> Generation:
        """Queue a request in the engine.

        Args:
            prompt: the prompt.
            max_new_tokens: maximum number of new tokens; None for 1024, or fewer if the model has fewer positions.
            sampling: the sampling settings of the request.
            mask: a mask of `grammars`, or None.

        Raises:
            TooLong: the prompt and the new tokens exceed the positions of the model.
            Busy, Stopping: see `Engine.submit`.
        """
        room = self.engine.max_length - len(prompt.ids)
        if max_new_tokens is None:
            max_new_tokens = max(1, min(room, _NEW_TOKENS))
        if max_new_tokens > room:
            raise TooLong(
                f"the prompt has {len(prompt.ids)} tokens and max_tokens={max_new_tokens}; together at most "
                f"{self.engine.max_length} are supported: shorten the prompt or lower max_tokens"
            )
        config = sampling.config(self.model.generation_config)
        return self.engine.submit(
            prompt.ids,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self.ends),
            logits_processor=processors(config, mask),
            do_sample=bool(config.do_sample),
            seed=sampling.seed,
        )

    def text(self, prompt: Prompt, stop: Sequence[str] = (), form: Form = "anything") -> TextStream:
        """Return the stream that converts the tokens after `prompt` to text and tool calls.

        Args:
            prompt: the prompt.
            stop: strings that end the answer.
            form: the form that a grammar enforces.
        """
        return TextStream(self.tokenizer, self.ends, prompt, stop, self._parser(prompt, form))

    def pieces(self, generation: Generation, text: TextStream) -> AsyncIterator[Piece]:
        """Yield the pieces of an answer; see `Streams.pieces`."""
        return self._streams.pieces(generation, text)

    def close(self, timeout: float | None = None) -> bool:
        """Finish running requests; cancel those that run after `timeout` seconds."""
        self.engine.close(timeout)
        self._streams.close()
        return True

    def _parser(self, prompt: Prompt, form: Form) -> Parser | None:
        if not prompt.is_chat or form == "JSON":
            return None
        if form == "call":
            return CallParser()
        return parser(self.model, self.tokenizer, prompt.ids, prompt.tools)

    def _check_template(self, variable: str, feature: str) -> None:
        """
        Raises:
            BadInput: the model has no chat template, or its template does not use the variable.
        """
        template = self.tokenizer.chat_template
        source = "\n".join(template.values()) if isinstance(template, dict) else template
        if not source:
            raise BadInput(f"model {self.name!r} has no chat template: use /v1/completions")
        if not re.search(rf"\b{re.escape(variable)}\b", source):
            raise BadInput(f"the chat template of {self.name!r} does not support {feature}; leave it out")


def _ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
